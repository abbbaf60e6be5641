"""The ``rl3d`` command: one module for each. Nothing heavy is imported until one needs it: ``--help`` answers at once."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rl3d import __version__

USAGE_ERROR = 2
COMMANDS = (
    "train", "generate", "plan", "scale", "memory", "config", "check_env", "prepare", "export", "convert", "files", "bench",
)  # fmt: skip
"""Modules of this package, one for each command, in the order of ``--help``. Each has ``add(commands)``, which declares
the command, and ``run(args)``, which imports what it needs and returns the exit code."""
PLAIN_ERRORS = {
    "BenchError", "CheckpointError", "ConfigError", "ConvertError", "DataError", "GenerationError", "HubError",
    "PrepareError", "ResumeError", "StartupError", "TopologyError", "UnsupportedModelError", "UsageError",
}  # fmt: skip


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

    for module in COMMANDS:
        import_module(f"rl3d.cli.{module}").add(commands)
    return parser


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
    return isinstance(error, LayoutError) or bool(names & PLAIN_ERRORS)


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
