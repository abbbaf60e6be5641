"""What a plan costs, and the least that it could cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl3d.layout import ShardLayout
from rl3d.reshard.boxes import Ints
from rl3d.reshard.routing import Levels
from rl3d.reshard.schedule import Segments
from rl3d.reshard.streams import ALIGN
from rl3d.reshard.traffic import Traffic


@dataclass(frozen=True)
class Certificate:
    """Bytes of a plan beside their lower bounds.

    ``received`` and ``bound`` follow ``destination_ranks``; ``sent`` follows ``sending_ranks``, the source's and those
    that hand on what they received. The bound of a rank is
    what it must hold afterwards minus what it already holds; it is computed from the layouts, not from the plan.

    Attributes:
        local: bytes that ranks keep, over all ranks.
        between_nodes, ingress, ingress_bound: bytes that enter nodes, in all and by node, and the least that can.
        sent_bound: least load of the busiest sender when only holders send and nodes do not matter (the optimum of a
            linear program; a relay may do better).
        between_max, between_bound: busiest sender between nodes, and the least that it can send with least ingress.
        inside_max, inside_bound: the same inside nodes.
        rows: boxes of all ranks. ``buckets`` and ``staging_peak`` are the schedule's.
    """

    source: str
    destination: str
    source_ranks: tuple[int, ...]
    sending_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    received: tuple[int, ...]
    bound: tuple[int, ...]
    sent: tuple[int, ...]
    sent_bound: int
    local: int
    between_nodes: int
    ingress: tuple[int, ...]
    ingress_bound: tuple[int, ...]
    between_max: int
    between_bound: int
    inside_max: int
    inside_bound: int
    rows: int
    buckets: int
    staging_bytes: int
    staging_peak: int

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> "Certificate":
        """From ``asdict`` that went through JSON, which turns tuples into lists."""
        fixed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fixed)

    @property
    def ratio(self) -> float:
        """Received bytes over the lower bound; 1.0 is optimal."""
        return _ratio(sum(self.received), sum(self.bound))

    @property
    def ratios(self) -> dict[str, float]:
        """Each cost over its bound; 1.0 is optimal."""
        return {
            "received": self.ratio,
            "sent": _ratio(max(self.sent, default=0), self.sent_bound),
            "ingress": _ratio(sum(self.ingress), sum(self.ingress_bound)),
            "between": _ratio(self.between_max, self.between_bound),
            "inside": _ratio(self.inside_max, self.inside_bound),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data with mean and maximum beside the lists."""
        return asdict(self) | {
            "ratio": self.ratio, "ratios": self.ratios,
            "received_mean": _mean(self.received), "received_max": max(self.received, default=0),
            "bound_mean": _mean(self.bound), "bound_max": max(self.bound, default=0),
            "sent_mean": _mean(self.sent), "sent_max": max(self.sent, default=0),
        }  # fmt: skip


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratio(found: int, least: int) -> float:
    """1.0 where nothing has to move."""
    return found / least if least else 1.0 + (found > 0)


def certify(
    src: ShardLayout, dst: ShardLayout, traffic: Traffic, segments: Segments, levels: Levels, nodes: Ints, rows: int,
    staging_bytes: int,
) -> Certificate:  # fmt: skip
    """Add up a finished plan. ``rows`` is the number of its boxes, ``nodes`` the node of each rank."""
    size = len(nodes)
    amount = (segments.stop - segments.start).astype(np.int64)
    moved = segments.src != segments.dst
    crossing = nodes[segments.src] != nodes[segments.dst]

    def per_rank(end: np.ndarray, mask: np.ndarray) -> Ints:
        # bincount adds in float64, which is exact for whole numbers below 2**53
        return np.bincount(end[mask], amount[mask], size).astype(np.int64)

    received, sent = per_rank(segments.dst, moved), per_rank(segments.src, moved)
    senders = sorted({*src.ranks, *np.flatnonzero(sent).tolist()})
    between, inside = per_rank(segments.src, crossing), per_rank(segments.src, moved & ~crossing)
    ingress = np.bincount(nodes[segments.dst[crossing]], amount[crossing], len(levels.ingress)).astype(np.int64)
    return Certificate(
        source=src.name,
        destination=dst.name,
        source_ranks=src.ranks,
        sending_ranks=tuple(senders),
        destination_ranks=dst.ranks,
        received=tuple(received[list(dst.ranks)].tolist()),
        bound=tuple(_least_received(traffic, size)[list(dst.ranks)].tolist()),
        sent=tuple(sent[senders].tolist()),
        sent_bound=levels.sender,
        local=int(amount[~moved].sum()),
        between_nodes=int(amount[crossing].sum()),
        ingress=tuple(ingress.tolist()),
        ingress_bound=levels.ingress,
        between_max=int(between.max(initial=0)),
        between_bound=levels.between,
        inside_max=int(inside.max(initial=0)),
        inside_bound=levels.inside,
        rows=rows,
        buckets=int(segments.bucket.max(initial=-1)) + 1,
        staging_bytes=staging_bytes,
        staging_peak=_peak(segments, amount, size),
    )


def _least_received(traffic: Traffic, size: int) -> Ints:
    """What each rank wants minus what it holds."""
    least = np.zeros(size, np.int64)
    for lacking, amount in zip(traffic.lacking, traffic.boxes.class_bytes.tolist(), strict=True):
        least[lacking] += amount
    return least


def _peak(segments: Segments, amount: Ints, size: int) -> int:
    """Fullest staging buffer: all messages of a rank in a bucket, each rounded up to the alignment."""
    wire = np.flatnonzero(segments.bucket >= 0)
    if not len(wire):
        return 0
    bucket, src, dst = (column[wire].astype(np.int64) for column in (segments.bucket, segments.src, segments.dst))
    key = (bucket * size + src) * size + dst
    heads = np.flatnonzero(np.concatenate([[True], np.diff(key) != 0]))  # segments are sorted this way
    length = -(-np.add.reduceat(amount[wire], heads) // ALIGN) * ALIGN
    most = 0
    for end in (src, dst):
        most = max(most, int(np.bincount(bucket[heads] * size + end[heads], length).max()))
    return most
