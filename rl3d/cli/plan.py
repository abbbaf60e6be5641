"""``rl3d plan``: the switch between two layouts, its bytes against their bounds, its seconds; or the best layouts."""

import argparse
import json
import sys
from typing import Any

from rl3d.cli.arguments import command, links, model, positive


def add(commands: Any) -> None:
    sub = command(
        commands,
        "plan",
        run,
        "Plan the switch between a training and a generation layout.",
        "Prints the bytes that each rank receives and sends beside their lower bounds, the predicted seconds and who holds "
        "what. Needs no GPU and no weights.",
    )
    model(sub)
    sub.add_argument("--train", metavar="LAYOUT", help="training layout, for example tp4.pp2.dp1.zero1")
    sub.add_argument("--gen", metavar="LAYOUT", help="generation layout, for example tp2")
    sub.add_argument("--gpus", metavar="N", type=positive, help="number of GPUs; what --train needs when left out")
    links(sub)
    sub.add_argument("--staging-mib", metavar="N", type=positive, default=48, help="cap on staging memory a direction (48)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")


def run(args: argparse.Namespace) -> int:
    from rl3d.estimate.moves import plan_move, world_size_of
    from rl3d.estimate.topology import Topology
    from rl3d.layout import GenLayout, LayoutError, TrainLayout
    from rl3d.models.mixture import planned_architecture
    from rl3d.models.shapes import find_model

    train = TrainLayout.parse(args.train) if args.train else None
    gen = GenLayout.parse(args.gen) if args.gen else None
    gpus = world_size_of(train, args.gpus)
    topology = Topology.read(args.topology).with_gpus_per_node(args.gpus_per_node)
    topology.nodes_of(gpus)
    name, config = find_model(args.model)
    if train is None or gen is None:
        raise LayoutError("give both layouts, for example --train tp2.pp2.zero1 --gen tp4")
    arch = planned_architecture(config)
    move = plan_move(arch, train, gen, gpus, topology, dtype=args.dtype, staging_bytes=args.staging_mib << 20)
    if args.json:
        print(json.dumps({"model": name, **move.to_json()}))
        return 0
    _show(name, arch, move, topology)
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
        f"{1e3 * t.pack:.0f}, copies in place {1e3 * t.local:.0f}; planned in {move.plan_seconds:.2f} s\n"
    )
    print(draw(move, console.width))
