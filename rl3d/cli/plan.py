"""``rl3d plan``: the switch between two layouts, its bytes against their bounds, its seconds; or the best layouts."""

import argparse
import json
import sys
from typing import Any

from rl3d.cli.arguments import command, links, model, positive, workload


def add(commands: Any) -> None:
    sub = command(
        commands,
        "plan",
        run,
        "Plan the switch between a training and a generation layout.",
        "Prints the bytes that each rank receives and sends beside their lower bounds, the predicted seconds and who holds "
        "what. With --gpus alone, or with one of the two layouts, the best five pairs. Needs no GPU and no weights.",
    )
    model(sub)
    sub.add_argument("--train", metavar="LAYOUT", help="training layout, for example tp4.pp2.dp1.zero1")
    sub.add_argument("--gen", metavar="LAYOUT", help="generation layout, for example tp2")
    sub.add_argument("--gpus", metavar="N", type=positive, help="number of GPUs; what --train needs when left out")
    links(sub)
    sub.add_argument("--staging-mib", metavar="N", type=positive, default=48, help="cap on staging memory a direction (48)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    workload(sub.add_argument_group("for the best pairs"))


def run(args: argparse.Namespace) -> int:
    from rl3d.estimate.moves import plan_move, world_size_of
    from rl3d.estimate.topology import Topology
    from rl3d.layout import GenLayout, TrainLayout
    from rl3d.models import Architecture
    from rl3d.models.shapes import find_model

    train = TrainLayout.parse(args.train) if args.train else None
    gen = GenLayout.parse(args.gen) if args.gen else None
    gpus = world_size_of(train, args.gpus)
    topology = Topology.read(args.topology).with_gpus_per_node(args.gpus_per_node).with_memory(args.gpu_mem)
    topology.nodes_of(gpus)
    name, config = find_model(args.model)
    if train is None or gen is None:
        arch = Architecture.from_hf(config)  # what is trained: mixtures are refused by name
        return _best(args, name, arch, topology, gpus, train, gen)
    arch = Architecture.from_hf(config, convert_only=True)
    move = plan_move(arch, train, gen, gpus, topology, dtype=args.dtype, staging_bytes=args.staging_mib << 20)
    if args.json:
        print(json.dumps({"model": name, **move.to_json()}))
        return 0
    _show(name, arch, move, topology)
    return 0


def _best(args: argparse.Namespace, name: str, arch: Any, topology: Any, gpus: int, train: Any, gen: Any) -> int:
    """Print the best five pairs, why each, and the lines to paste for the first."""
    from rich.console import Console

    from rl3d.cli.pairs import pairs_table, why, workload_of
    from rl3d.estimate.fit import memory_of
    from rl3d.estimate.scale import candidates

    work = workload_of(args)
    staging = args.staging_mib << 20
    fits = memory_of(arch, topology, work, args.dtype, staging)
    found = candidates(arch, gpus, topology, work, fits, train=train, gen=gen, dtype=args.dtype, staging_bytes=staging)
    best = [c for c in found[:5] if c.step]
    if args.json:
        pairs = [{"train": str(c.train), "gen": str(c.gen), "step_seconds": c.step.total, "why": why(c),
                  "switch": c.move.to_json() if c.move else None} for c in best if c.step]  # fmt: skip
        print(json.dumps({"model": name, "gpus": gpus, "fit": sum(c.step is not None for c in found), "pairs": pairs}))
        return 0 if best else 1
    if not best:
        print(f"{name} on {gpus} GPUs of {topology.memory_gb:g} GB ({topology.name}): none of {len(found)} pairs fits")
        for c in found[:5]:
            print(f"  {c.train} -> {c.gen}: {c.reason}")
        print("try --offload optimizer, --recompute full, a smaller --micro-batch, or more GPUs")
        return 1
    title = f"{name} on {gpus} GPUs ({topology.name}), predicted: the best of {len(found)} pairs"
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(pairs_table(title, best, work))
    for number, c in enumerate(best, start=1):
        print(f"{number}. {why(c)}")
    first = best[0].train
    vpp = f".vpp{first.vpp}" if first.vpp > 1 else ""
    print(f"\nlayout:\n  train: tp{first.tp}.pp{first.pp}{vpp}.zero{first.zero}\n  gen: {best[0].gen}")
    for key, value, default in (("recompute", args.recompute, "none"), ("offload", args.offload, "none"),
                                ("sequence_parallel", args.sequence_parallel, False)):  # fmt: skip
        if value != default:
            print(f"  {key}: {str(value).lower()}")
    print(f"\nMore about one: rl3d plan {args.model} --train {first} --gen {best[0].gen}")
    return 0


def _show(name: str, arch: Any, move: Any, topology: Any) -> None:
    from rich.console import Console

    from rl3d.cli.picture import draw

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    ranks, replicas = len(move.source.ranks), len(move.source.ranks) // move.gen.tp
    nodes = topology.nodes_of(ranks)[-1] + 1
    print(
        f"{name}, {arch.num_parameters / 1e9:.2f}B parameters, {ranks} GPUs on {nodes} node{'s' * (nodes > 1)} "
        f"({topology.name}): {move.train} -> {move.gen}, {replicas} {'copy' if replicas == 1 else 'copies'}\n"
    )
    console.print(move.plan.summary_table())
    t = move.time
    print(
        f"\npredicted switch {1e3 * t.seconds:.0f} ms: links {1e3 * t.wire:.0f} (most of it: {t.limit}), staging "
        f"{1e3 * t.pack:.0f}, copies in place {1e3 * t.local:.0f}, checks {1e3 * t.host:.0f}; "
        f"planned in {move.plan_seconds:.2f} s\n"
    )
    print(draw(move, console.width))
