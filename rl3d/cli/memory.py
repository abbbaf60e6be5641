"""``rl3d memory``: what a configuration needs on each rank, phase by phase, without starting it."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rl3d.cli.arguments import command, config_file, positive

if TYPE_CHECKING:
    from rl3d.config import RunConfig
    from rl3d.estimate.request import Request


def add(commands: Any) -> None:
    sub = command(
        commands,
        "memory",
        run,
        "Say what a configuration needs of each GPU, phase by phase, and what would make it fit.",
        "By arithmetic: no GPU, no weights. Exit 1 when --gpu-mem is too little.",
    )
    config_file(sub)
    sub.add_argument("--ranks", metavar="N", type=positive, help="plan for N ranks with one GPU each (layout.ranks)")
    sub.add_argument("--gpu-mem", metavar="GB", type=float, help="memory of each GPU, in GB (10^9 bytes)")
    sub.add_argument("--cpu", action="store_true", help="plan for a CPU run, not for GPUs")
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    from rl3d.config import load_config, read_hf_config, resolve
    from rl3d.estimate.check import Capacity, problem
    from rl3d.estimate.request import Request

    device = "cpu" if args.cpu else "cuda"
    cfg = load_config(args.config, [*args.overrides, f"layout.device={device}"])
    # ranks as they were started: one GPU each, whether or not this machine has any
    world = args.ranks or (cfg.layout.ranks if isinstance(cfg.layout.ranks, int) else None)
    cfg = resolve(cfg, world_size=world, gpus=0 if args.cpu else (world or 1))
    limit = args.gpu_mem if args.gpu_mem is not None else cfg.layout.memory_limit_gb
    request = Request.of(cfg, read_hf_config(cfg), None if limit is None else int(limit * 1e9))
    plan = request.plan()
    if args.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        show(cfg, request)
    if limit is None:
        return 0
    wrong = problem(request, Capacity(int(limit * 1e9), "a GPU"), plan)
    if not args.json:
        print(f"fits {limit:g} GB" if wrong is None else f"does not fit: {wrong.text}")
    return 0 if wrong is None else 1


def show(cfg: "RunConfig", request: "Request") -> None:
    """The plan as a table, with what it says in total."""
    from rich.console import Console

    from rl3d.estimate.table import shown

    plan = request.plan()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    what = f"{request.arch.family}, {request.arch.num_parameters / 1e9:.2f}B parameters, {cfg.model.dtype}"
    console.print(f"{what}; train {request.train}, generate {request.gen}, {request.world} ranks", soft_wrap=True)
    console.print(plan.table())
    host = f"; host memory {shown(sum(plan.host.values()))}" if plan.host else ""
    console.print(
        f"each rank needs {shown(plan.needed)}: {shown(plan.peak)} allocated in the phase {plan.peak_phase.name!r}, "
        f"{shown(plan.needed - plan.peak - plan.outside)} lost to fragmentation, {shown(plan.outside)} outside torch{host}",
        soft_wrap=True,
    )
