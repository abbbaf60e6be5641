"""Predicted seconds of a move: bytes over the rates of the links they take, bucket by bucket."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl3d.estimate.topology import Topology
from rl3d.reshard.plan import Plan


@dataclass(frozen=True)
class MoveTime:
    """Where the seconds of a move go.

    ``seconds`` is the sum of ``wire`` (links and latency), ``pack`` (into and out of staging memory) and ``local``
    (copies of what a rank has already). ``limit`` says what most of the wire time waits for.
    """

    seconds: float
    wire: float
    pack: float
    local: float
    latency: float
    limit: str


def predict_move(plan: Plan, topology: Topology) -> MoveTime:
    """Seconds of ``plan`` on ``topology``.

    A bucket is packed, sent and unpacked before the next one, so its time is the sum of the three. Its messages travel
    at once: the wire takes as long as its busiest resource, which is a GPU's link inside the node (bytes / rate +
    latency x messages, out or in) or a network card (out or in; GPUs of a node share cards evenly).

    Raises :class:`TopologyError` when the plan's ranks do not fit the topology.
    """
    rows = plan.rows
    size = max((*plan.source.ranks, *plan.destination.ranks), default=-1) + 1
    nodes = np.array(topology.nodes_of(size), np.int64)
    moved = np.flatnonzero(rows.moved)
    local = _local_seconds(plan, size, topology)
    if not len(moved):
        return MoveTime(local, 0.0, 0.0, local, 0.0, "nothing travels")

    src, dst, bucket = (column[moved].astype(np.int64) for column in (rows.src, rows.dst, rows.bucket))
    key = (bucket * size + src) * size + dst
    keys, which = np.unique(key, return_inverse=True)
    nbytes = np.bincount(which.reshape(-1), rows.nbytes[moved].astype(np.float64))
    src, dst, bucket = keys // size % size, keys % size, keys // size**2
    buckets = int(bucket.max()) + 1
    inside = nodes[src] == nodes[dst]

    def load(end: NDArray[np.int64], weight: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        return np.bincount(bucket * count + end, weight, minlength=buckets * count).reshape(buckets, count)

    latency = np.where(inside, topology.inside_latency_us, topology.between_latency_us) * 1e-6
    link = np.where(inside, nbytes / (topology.inside_gb_per_s * 1e9), 0.0)
    card = np.where(inside, 0.0, nbytes / (topology.between_gb_per_s * 1e9))
    cards = (int(nodes.max()) + 1) * topology.nics_per_node
    card_of = _cards(size, nodes, topology)
    parts = {"latency of messages": np.zeros(buckets), "links inside a node": np.zeros(buckets),
             "cards between nodes": np.zeros(buckets)}  # fmt: skip
    wire = np.zeros(buckets)
    for end in (src, dst):
        calls, links = load(end, latency, size), load(end, link, size)
        busy_card = load(card_of[end], card, cards)
        wire = np.maximum(wire, np.maximum(links + calls, busy_card[:, card_of[:size]] + calls).max(axis=1))
        for name, table in zip(parts, (calls, links, busy_card)):
            parts[name] = np.maximum(parts[name], table.max(axis=1))
    copies = sum(load(end, nbytes, size).max(axis=1).sum() for end in (src, dst))
    pack = float(copies / (topology.copy_gb_per_s * 1e9))
    limit = max(parts, key=lambda name: float(parts[name].sum()))
    total = float(wire.sum())
    return MoveTime(total + pack + local, total, pack, local, float(parts["latency of messages"].sum()), limit)


def _cards(size: int, nodes: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """Network card of each rank: the GPUs of a node take its cards evenly, neighbours share one."""
    within = np.arange(size) % topology.gpus_per_node
    return nodes * topology.nics_per_node + within * topology.nics_per_node // topology.gpus_per_node


def _local_seconds(plan: Plan, size: int, topology: Topology) -> float:
    rows = plan.rows
    here = np.flatnonzero(rows.src == rows.dst)
    copied = np.bincount(rows.dst[here], rows.nbytes[here].astype(np.float64), minlength=size)
    return float(copied.max(initial=0.0)) / (topology.copy_gb_per_s * 1e9)
