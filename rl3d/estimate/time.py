"""Predicted seconds of a move: bytes over the rates of the links they take, bucket by bucket."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl3d.estimate.topology import Topology
from rl3d.reshard.plan import Plan

HOST = 4.3e-3
"""What a switch takes however little it moves: about 400 tensors are checked on the host, all ranks agree before and after.
Fitted to one of ten moves of a 7B model between two H200s; ``tests/estimate/measured.py`` has them all."""


@dataclass(frozen=True)
class MoveTime:
    """Where the seconds of a move go.

    ``host`` is :data:`HOST`, ``local`` copies what a rank has already. Then buckets follow each other: ``wire`` is what the
    slower of the busiest rank and the busiest network card spends on links and latency, ``pack`` what the busiest rank adds
    by copying into and out of staging memory. ``limit`` names what takes most.
    """

    seconds: float
    wire: float
    pack: float
    local: float
    latency: float
    limit: str
    host: float = HOST


def predict_move(plan: Plan, topology: Topology, *, peers: bool = True) -> MoveTime:
    """Seconds of ``plan`` on ``topology``. ``peers``: the ranks of a node read each other's memory, all boxes at once and
    without staging; otherwise they exchange messages, as ranks on different nodes do.

    A rank goes through its buckets one after the other: it packs, sends and receives at once (the slower of the two
    counts; bytes / rate of the link + latency x messages), and unpacks. Ranks wait for each other only where they
    exchange, so no global step is assumed: the move takes as long as the busiest rank, or as the busiest network card
    (in or out; the GPUs of a node share its cards evenly) where that is longer.

    Raises :class:`TopologyError` when the plan's ranks do not fit the topology.
    """
    runs = plan.segments
    size = max((*plan.source.ranks, *plan.destination.ranks), default=-1) + 1
    nodes = np.array(topology.nodes_of(size), np.int64)
    moved = np.flatnonzero(runs.src != runs.dst)
    local = _local_seconds(plan, size, topology)
    if not len(moved):
        return MoveTime(local + HOST, 0.0, 0.0, local, 0.0, "nothing travels")

    src, dst, bucket = (column[moved].astype(np.int64) for column in (runs.src, runs.dst, runs.bucket))
    if peers:
        bucket = np.where(nodes[src] == nodes[dst], 0, bucket + 1)
    keys, which = np.unique((bucket * size + src) * size + dst, return_inverse=True)
    nbytes = np.bincount(which.reshape(-1), (runs.stop - runs.start)[moved].astype(np.float64))
    src, dst, bucket = keys // size % size, keys % size, keys // size**2
    buckets = int(bucket.max()) + 1
    inside = nodes[src] == nodes[dst]

    def each(weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Summed for sending and receiving, each bucket and each rank."""
        return np.stack([np.bincount(bucket * size + end, weight, minlength=buckets * size).reshape(buckets, size)
                         for end in (src, dst)])  # fmt: skip

    link = each(np.where(inside, nbytes / (topology.inside_gb_per_s * 1e9), 0.0))
    crossing = np.where(inside, 0.0, nbytes / (topology.between_gb_per_s * 1e9))
    cross = each(crossing)
    calls = each(np.where(inside, 0.0 if peers else topology.inside_latency_us, topology.between_latency_us) * 1e-6)
    # links inside and the card carry at once; so do the two directions
    travelling = (np.maximum(link, cross) + calls).max(axis=0).sum(axis=0)
    copying = each(np.where(inside, 0.0 if peers else nbytes, nbytes)).sum(axis=(0, 1)) / (topology.copy_gb_per_s * 1e9)
    busiest = int(np.argmax(travelling + copying))

    card_of = _cards(size, nodes, topology)
    card = max(float(np.bincount(card_of[end], crossing).max()) for end in (src, dst))
    wire, pack = max(float(travelling[busiest]), card), float(copying[busiest])
    seconds = max(float(travelling[busiest]) + pack, card)
    of_busiest = [float(table[:, :, busiest].max(axis=0).sum()) for table in (calls, cross, link)]
    parts = {"latency of messages": of_busiest[0], "network cards": max(card, of_busiest[1]),
             "links inside a node": of_busiest[2]}  # fmt: skip
    limit = max(parts, key=lambda name: parts[name])
    return MoveTime(local + seconds + HOST, wire, max(0.0, seconds - wire), local, of_busiest[0], limit)


def _cards(size: int, nodes: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """Network card of each rank: the GPUs of a node take its cards evenly, neighbours share one."""
    within = np.arange(size) % topology.gpus_per_node
    return nodes * topology.nics_per_node + within * topology.nics_per_node // topology.gpus_per_node


def _local_seconds(plan: Plan, size: int, topology: Topology) -> float:
    runs = plan.segments
    here = np.flatnonzero(runs.src == runs.dst)
    copied = np.bincount(runs.dst[here], (runs.stop - runs.start)[here].astype(np.float64), minlength=size)
    return float(copied.max(initial=0.0)) / (topology.copy_gb_per_s * 1e9)
