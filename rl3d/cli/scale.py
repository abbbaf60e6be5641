"""``rl3d scale``: which layouts fit on so many GPUs, how long a step takes, and what more GPUs bring."""

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl3d.cli.arguments import UsageError, command, links, model, positive, workload

if TYPE_CHECKING:
    from rl3d.estimate.scale import Candidate
    from rl3d.estimate.step import Workload

PHASES = ("generation", "logprobs", "update", "switch", "host")


def add(commands: Any) -> None:
    sub = command(
        commands,
        "scale",
        run,
        "Predict memory and step time of every pair of layouts on several numbers of GPUs.",
        "The best few are printed first; the switch of these is planned exactly. Needs no GPU and no weights. Seconds are "
        "arithmetic with constants fitted to one and two H200s (rl3d/estimate/kernels.py): good for comparing layouts.",
    )
    model(sub)
    sub.add_argument("--gpus", metavar="N,N,...", type=_sizes, required=True, help="for example 8,16,32,64")
    links(sub)
    workload(sub)
    sub.add_argument("--top", metavar="N", type=positive, default=5, help="pairs to print for each size (5)")
    sub.add_argument("--all", action="store_true", help="print every pair, and why it does not fit")
    sub.add_argument("--csv", metavar="FILE", help="write every pair as a row")
    sub.add_argument("--plot", metavar="FILE.png", help="draw the scaling and the best steps (needs matplotlib)")


def _sizes(text: str) -> list[int]:
    return sorted({positive(word) for word in text.split(",")})


def run(args: argparse.Namespace) -> int:
    from rl3d.cli.pairs import workload_of
    from rl3d.estimate.fit import memory_of
    from rl3d.estimate.moves import STAGING_BYTES
    from rl3d.estimate.scale import candidates, scaling
    from rl3d.estimate.topology import Topology
    from rl3d.models import Architecture
    from rl3d.models.shapes import find_model

    topology = Topology.read(args.topology).with_gpus_per_node(args.gpus_per_node).with_memory(args.gpu_mem)
    for gpus in args.gpus:
        topology.nodes_of(gpus)
    if args.plot:
        _drawing()  # before anything is computed
    name, config = find_model(args.model)
    arch = Architecture.from_hf(config)
    work = workload_of(args)
    table: dict[int, list[Candidate]] = {}
    weak: dict[int, tuple[Workload, Candidate]] = {}
    for gpus in args.gpus:
        fits = memory_of(arch, topology, work, args.dtype, STAGING_BYTES)
        table[gpus] = candidates(arch, gpus, topology, work, fits, dtype=args.dtype, planned=args.top)
        scaled = work.times(gpus / args.gpus[0])
        fits = memory_of(arch, topology, scaled, args.dtype, STAGING_BYTES)
        found = (
            table[gpus] if scaled == work else candidates(arch, gpus, topology, scaled, fits, dtype=args.dtype, planned=1)
        )
        weak[gpus] = (scaled, found[0])
        _show(gpus, table[gpus], work, args, topology)
    sizes = [gpus for gpus in args.gpus if table[gpus][0].step and weak[gpus][1].step]
    strong = scaling([table[gpus][0] for gpus in sizes], [work] * len(sizes))
    growing = scaling([weak[gpus][1] for gpus in sizes], [weak[gpus][0] for gpus in sizes])
    _show_scaling(strong, growing, work)
    if args.csv:
        _write_csv(Path(args.csv), name, table, work)
        print(f"wrote {args.csv}")
    if args.plot and sizes:
        _drawing()(Path(args.plot), name, topology.name, work, [table[gpus][0] for gpus in sizes], strong, growing)
        print(f"wrote {args.plot}")
    return 0 if sizes else 1


def _drawing() -> Any:
    try:
        from rl3d.cli.scale_plot import draw
    except ImportError as error:
        raise UsageError(f"--plot draws with matplotlib ({error}); pip install 'rl3d[plot]', or use --csv") from None
    return draw


def _show(gpus: int, found: "list[Candidate]", work: "Workload", args: argparse.Namespace, topology: Any) -> None:
    from rich.console import Console

    from rl3d.cli.pairs import memory_line, pairs_table

    nodes = topology.nodes_of(gpus)[-1] + 1
    able = [c for c in found if c.step]
    title = f"{gpus} GPU{'s' * (gpus > 1)}, {nodes} node{'s' * (nodes > 1)}: {len(able)} of {len(found)} pairs fit"
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    if able:
        console.print(pairs_table(title, able if args.all else able[: args.top], work))
        print(f"  memory of the best, GB: {memory_line(able[0])}")
    else:
        print(title)
    failed = [c for c in found if not c.step]
    for c in failed if args.all or not able else failed[:3]:
        print(f"  {c.train} -> {c.gen}: {c.reason}")
    if len(failed) > 3 and able and not args.all:
        print(f"  and {len(failed) - 3} more (--all lists them)")
    print()


def _show_scaling(strong: list[dict[str, Any]], weak: list[dict[str, Any]], work: "Workload") -> None:
    if not strong:
        return
    print(
        f"Scaling of the best pair. Strong: {work.sequences} sequences a step; weak: as many for {strong[0]['gpus']} GPUs."
    )
    print("GPUs   strong tokens/s  speed-up  efficiency      weak tokens/s  speed-up  efficiency")
    for s, w in zip(strong, weak, strict=True):
        print(f"{s['gpus']:4d} {s['tokens_per_s']:17.0f} {s['speedup']:9.2f} {s['efficiency']:11.0%} "
              f"{w['tokens_per_s']:18.0f} {w['speedup']:9.2f} {w['efficiency']:11.0%}")  # fmt: skip


def _write_csv(path: Path, name: str, table: "dict[int, list[Candidate]]", work: "Workload") -> None:
    items = sorted({(phase, item) for found in table.values() for c in found if c.fit
                    for phase, held in c.fit.phases.items() for item in held})  # fmt: skip
    heads = ["model", "gpus", "train", "gen", "fits", "reason", "step_s", *(f"{phase}_s" for phase in PHASES),
             "switch_from", "tokens_per_s_per_gpu", "training_bytes", "generation_bytes", "kv_room_bytes", "waves",
             *(f"{phase}: {item} bytes" for phase, item in items)]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(heads)
        for gpus, found in table.items():
            for c in found:
                row: list[Any] = [name, gpus, c.train, c.gen, int(c.step is not None), c.reason]
                row += (
                    [f"{x:.6g}" for x in (c.step.total, *(getattr(c.step, p) for p in PHASES))]
                    if c.step
                    else [""] * (1 + len(PHASES))
                )
                row += ["plan" if c.move else "formula" if c.step else ""]
                row += [f"{c.tokens_per_second(work):.6g}" if c.step else ""]
                row += [c.fit.training, c.fit.generation, c.fit.kv_bytes] if c.fit else [""] * 3
                row += [c.step.waves if c.step else ""]
                row += [c.fit.phases.get(phase, {}).get(item, "") if c.fit else "" for phase, item in items]
                out.writerow(row)
