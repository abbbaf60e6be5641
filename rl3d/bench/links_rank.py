"""One rank of ``rl3d bench links``: measures the links inside a node, then moves weights by each case's plan."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.bench.links import CASES, FRAMING, PER_NODE, RANKS, SHAPE
from rl3d.estimate.moves import Move, plan_move
from rl3d.estimate.time import predict_move
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, ShardLayout, TrainLayout
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard import Resharder


def main(mbit: int, scratch: Path) -> None:
    """Measure, move, and let rank 0 write ``report.json``."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    rate, latency, copies = _inside(rank, 8 << 20), _inside(rank, 64), _copies()
    measured = torch.tensor([rate, latency, copies])
    dist.broadcast(measured, 0)
    rate, latency, copies = measured.tolist()
    topology = Topology(
        "namespaces", PER_NODE, (8 << 20) / rate / 1e9, mbit / 8e3 * FRAMING, nics_per_node=1,
        inside_latency_us=1e6 * latency, between_latency_us=1e6 * latency, copy_gb_per_s=copies,
    )  # fmt: skip
    arch = Architecture.from_hf(SHAPE)
    cases = [_case(arch, train, gen, topology, rank) for train, gen in CASES]
    if rank == 0:
        report = {"parameters": arch.num_parameters, "inside_gb_per_s": topology.inside_gb_per_s,
                  "inside_latency_us": topology.inside_latency_us, "cases": cases}  # fmt: skip
        (scratch / "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _inside(rank: int, nbytes: int) -> float:
    """Seconds of one message in each direction between the neighbours of a node, both nodes at once."""
    out, into, peer = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8), rank ^ 1
    best = float("inf")
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]):
            work.wait()
        best = min(best, time.perf_counter() - start)
    return best


def _copies() -> float:
    """GB/s of a copy in memory, all ranks at once."""
    source, target = torch.ones(16 << 20, dtype=torch.uint8), torch.empty(16 << 20, dtype=torch.uint8)
    target.copy_(source)  # its pages exist from here on
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 4 * (16 << 20) / (time.perf_counter() - start) / 1e9


def _case(arch: Architecture, train: str, gen: str, topology: Topology, rank: int) -> dict[str, Any]:
    move = plan_move(arch, TrainLayout.parse(train), GenLayout.parse(gen), RANKS, topology, staging_bytes=1 << 20)
    tensors = [_tensors(arch, move, layout, rank) for layout in (move.source, move.target)]
    resharder = Resharder(move.plan, rank, None, tensors[0], tensors[1], "cpu")
    seconds = float("inf")
    for _ in range(4):
        time.sleep(0.1)  # the limiter's bucket fills in between, as it would before a switch
        dist.barrier()
        took = torch.tensor([resharder.run().seconds], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds = min(seconds, took.item())
    return {"train": str(move.train), "gen": str(move.gen), "between_nodes": move.plan.certificate.between_nodes,
            "predicted": predict_move(move.plan, topology, peers=False).seconds, "measured": seconds}  # fmt: skip


def _tensors(arch: Architecture, move: Move, layout: ShardLayout, rank: int) -> dict[str, torch.Tensor]:
    specs = parameter_specs(arch, arch.padded_vocab(move.train.tp, move.gen.tp), "bfloat16")
    return {s.name: torch.zeros(layout.local_shape(s), dtype=torch.bfloat16) for s in specs if layout.holds(s, rank)}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
