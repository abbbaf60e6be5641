"""``rl3d train``: check a configuration, then start its ranks or be one of them."""

import argparse
from typing import TYPE_CHECKING, Any

from rl3d.cli.arguments import command, config_file, positive

if TYPE_CHECKING:
    from rl3d.config import RunConfig
    from rl3d.config.base import Problem
    from rl3d.distributed.environment import Place


def add(commands: Any) -> None:
    train = command(
        commands,
        "train",
        run,
        "Train as a configuration file says.",
        "Checks everything first, then starts one rank per GPU (or what layout.ranks says); started by torchrun, "
        "deepspeed or srun it is one of their ranks.",
    )
    config_file(train)
    train.add_argument("--ranks", metavar="N", type=positive, help="number of ranks to start (layout.ranks)")
    train.add_argument("--dry-run", action="store_true", help="check everything, say what would run, start nothing")


def run(args: argparse.Namespace) -> int:
    from rl3d.config import ConfigError, check, count_gpus, load_config, resolve
    from rl3d.distributed.environment import detect, is_launched
    from rl3d.models.support import refuse_unsupported

    place = detect() if is_launched() else None
    if args.ranks:
        args.overrides.append(f"layout.ranks={args.ranks}")
    cfg = load_config(args.config, args.overrides)
    gpus = 0 if cfg.layout.device == "cpu" else count_gpus()
    cfg = resolve(cfg, world_size=place.world_size if place else args.ranks, gpus=gpus)
    if place is None and cfg.layout.device == "cuda" and args.ranks and args.ranks > gpus:
        raise ConfigError(f"--ranks {args.ranks}: only {gpus} GPU{'s' * (gpus > 1)} here; lower it or add layout.device=cpu")
    hf_config = check(cfg)
    refuse_unsupported(cfg, hf_config)
    if args.dry_run:
        if place is None or place.rank == 0:
            print(_summary(cfg, hf_config))
            wrong = _misfit(cfg, hf_config, show=True)
            print("Everything checks out; nothing was started." if wrong is None else "Nothing was started.")
            if wrong is not None and cfg.trainer.memory_check == "strict":
                raise ConfigError(wrong)
        return 0
    if place is None:
        if cfg.trainer.memory_check == "strict" and (wrong := _misfit(cfg, hf_config)) is not None:
            raise ConfigError(wrong)
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
    from rl3d.distributed import notice

    notice.remember()
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
        ("reward", ", ".join(term.what for term in cfg.reward.terms)),
        ("length", length),
        ("writes", str(cfg.run_dir)),
    ]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _misfit(cfg: "RunConfig", hf_config: dict[str, Any], show: bool = False) -> "Problem | None":
    """What is wrong with the memory plan on this machine, as far as the driver and the system say; None when it fits.

    ``show``: print the plan and what it is compared with.
    """
    from rl3d.cli.memory import show as show_plan
    from rl3d.distributed.devices import gpu_memory, host_memory
    from rl3d.estimate.check import Capacity, problem
    from rl3d.estimate.request import Request
    from rl3d.estimate.table import shown

    host, limit = host_memory(), cfg.layout.memory_limit_gb
    whole = None if cfg.layout.device == "cpu" else gpu_memory()
    request = Request.of(cfg, hf_config, whole if whole is not None or limit is None else int(limit * 1e9))
    if show:
        print()
        show_plan(cfg, request)
    assert isinstance(cfg.layout.ranks, int)
    if cfg.layout.device == "cpu":
        size, source = (None if host is None else host // cfg.layout.ranks), "the host, shared by all ranks,"
    else:
        size, source = whole, "a GPU of this machine"
    if limit is not None and (size is None or limit * 1e9 < size):
        size, source = int(limit * 1e9), f"layout.memory_limit_gb = {limit:g}"
    if size is None or cfg.trainer.memory_check == "off":
        return None
    if show:
        print(f"{source} gives each {shown(size)}")
    return problem(request, Capacity(size, source))
