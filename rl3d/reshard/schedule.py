"""When everything is sent: buckets under the staging cap, in few large messages.

A stream is all that one rank sends to another, in layer order. What has to be handed on inside a node is a stream of its
own for each receiver, with the same bytes in the same order, following the stream that brings them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints, distinct
from rl3d.reshard.firstfit import first_fit
from rl3d.reshard.rounds import fill_buckets
from rl3d.reshard.routing import Pieces
from rl3d.reshard.streams import ALIGN, Portions, Streams
from rl3d.reshard.traffic import Boxes

__all__ = ["ALIGN", "Segments", "schedule"]


class Segments(NamedTuple):
    """Columns of the finished plan: bytes ``start`` to ``stop`` of a class go from ``src`` to ``dst`` in ``bucket``.

    ``bucket`` is -1 and ``src == dst`` for what a rank keeps. ``relay`` segments are handed on: an earlier bucket has
    brought them to the sender's destination tensors.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    cls: NDArray[np.int32]
    start: Ints
    stop: Ints
    bucket: NDArray[np.int32]
    relay: NDArray[np.bool_]

    def take(self, index: NDArray[Any]) -> "Segments":
        """The chosen segments (index array or mask)."""
        return Segments(*(column[index] for column in self))  # type: ignore[arg-type]

    def join(self, other: "Segments") -> "Segments":
        """These and then the others."""
        return Segments(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))  # type: ignore[arg-type]


class _Contents(NamedTuple):
    """Streams and the pieces that each consists of: those of stream ``i`` are ``pointer[i]`` to ``pointer[i + 1]``."""

    streams: Streams
    pointer: Ints
    cls: Ints
    start: Ints
    stop: Ints


def schedule(boxes: Boxes, pieces: Pieces, first: Ints, ranks: int, staging_bytes: int) -> Segments:
    """Cut pieces into segments and give each a bucket.

    Args:
        boxes: the classes' contents, which say where boxes may be cut.
        pieces: who sends what to whom.
        first: place in layer order of each class.
        ranks: number of ranks.
        staging_bytes: most bytes that a rank sends, or receives, in one bucket.
    """
    if not len(pieces.src):
        none = np.zeros(0, np.int64)
        short = none.astype(np.int32)
        return Segments(short, short, short, none, none, short, np.zeros(0, np.bool_))
    # Rows of this size or less are never cut; messages may come out longer by one of them.
    limit = staging_bytes // 64
    # Messages are budgeted by the alignment, so only whole multiples of it count.
    cap = staging_bytes // ALIGN * ALIGN
    contents = _streams(boxes, pieces, first, limit)
    return _cut(boxes, contents, _fill(contents.streams, ranks, cap), limit)


def _streams(boxes: Boxes, pieces: Pieces, first: Ints, limit: int) -> _Contents:
    order = np.lexsort((pieces.start, pieces.cls, first[pieces.cls], pieces.fan, pieces.dst, pieces.src))
    src, dst, cls, start, stop, fan = (column[order] for column in pieces[:6])
    size = stop - start
    changes = (np.diff(src) != 0) | (np.diff(dst) != 0) | (np.diff(fan) != 0)
    begin = np.flatnonzero(np.concatenate([[True], changes]))
    pointer = np.append(begin, len(src))
    slack = np.minimum(np.maximum.reduceat(boxes.grain(limit)[cls], begin), max(limit, 8))
    src, dst, fan = src[begin], dst[begin], fan[begin]
    islands = _Islands.of(src, dst)
    # Equally urgent streams go to the next rank first, then to the one after it
    turn = (islands.place[dst] - islands.place[src]) % islands.members[dst]
    direct = Streams(src, dst, np.add.reduceat(size, begin), slack, np.full(len(src), -1), turn)
    if (fan < 0).all():
        return _Contents(direct, pointer, cls, start, stop)

    # One stream for each further receiver
    relays = np.flatnonzero(fan >= 0)
    others = [pieces.fans[f] for f in fan[relays].tolist()]
    others = [o[o != by] for o, by in zip(others, dst[relays].tolist(), strict=True)]
    parent = np.repeat(relays, [len(o) for o in others])
    to = np.concatenate(others)
    handed = Streams(dst[parent], to, direct.size[parent], slack[parent], parent, direct.turn[parent])
    streams = Streams(*(np.concatenate(pair) for pair in zip(direct, handed, strict=True)))
    count = np.diff(pointer)[parent]
    index = np.arange(count.sum()) + np.repeat(pointer[parent] - (np.cumsum(count) - count), count)
    index = np.concatenate([np.arange(len(cls)), index])
    pointer = np.concatenate([pointer, pointer[-1] + np.cumsum(count)])
    return _Contents(streams, pointer, cls[index], start[index], stop[index])


class _Islands(NamedTuple):
    """Ranks that are connected by streams, directly or through others.

    ``island`` of each rank, its ``place`` among the ranks of that island, and how many ``members`` that island has.
    """

    island: Ints
    place: Ints
    members: Ints

    @classmethod
    def of(cls, src: Ints, dst: Ints) -> "_Islands":
        ranks = int(max(src.max(), dst.max())) + 1
        root = np.arange(ranks)
        while True:
            low = np.minimum(root[src], root[dst])
            before = root.copy()
            np.minimum.at(root, src, low)
            np.minimum.at(root, dst, low)
            root = root[root]
            if (root == before).all():
                break
        order = np.argsort(root, kind="stable")
        start = np.flatnonzero(np.concatenate([[True], np.diff(root[order]) != 0]))
        count = np.diff(np.append(start, ranks))
        place, members = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
        place[order] = np.arange(ranks) - np.repeat(start, count)
        members[order] = np.repeat(count, count)
        return cls(root, place, members)


MATCHED = 32768
"""So many streams are matched bucket by bucket; more are placed one after the other."""

MANY = 4096
"""From this many streams on, small ones travel last: they join islands that would be apart, and fit a bucket or two."""


def _fill(streams: Streams, ranks: int, cap: int) -> Portions:
    """Portions of all streams; of very many, the large ones first."""
    small = streams.size < cap // 64
    if len(small) < MANY or small.all() or not small.any():
        return _fill_alike(streams, ranks, cap)
    parts, bucket = [], 0
    for chosen in (np.flatnonzero(~small), np.flatnonzero(small)):
        # A stream and the one that it hands on are of one size.
        found = _fill_alike(_some(streams, chosen), ranks, cap)
        parts.append((chosen[found.stream], found.bucket + bucket, found.size))
        bucket += int(found.bucket.max()) + 1
    return _rising(parts)


def _some(streams: Streams, chosen: Ints) -> Streams:
    """The chosen streams, with their parents among them."""
    number = np.full(len(streams.src), -1)
    number[chosen] = np.arange(len(chosen))
    some = Streams(*(column[chosen] for column in streams))
    return some._replace(parent=np.where(some.parent < 0, -1, number[some.parent]))


def _rising(parts: list[tuple[Ints, Ints, Ints]]) -> Portions:
    stream, bucket, size = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(stream, kind="stable")
    return Portions(stream[order], bucket[order], size[order])


def _fill_alike(streams: Streams, ranks: int, cap: int) -> Portions:
    """:func:`fill_buckets`, once for islands that look alike: replicas of a layout mostly do."""
    islands = _Islands.of(streams.src, streams.dst)
    island = islands.island[streams.src]
    order = np.argsort(island, kind="stable")
    begin = np.flatnonzero(np.concatenate([[True], np.diff(island[order]) != 0]))
    local = np.empty(len(order), np.int64)
    local[order] = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
    parent = np.where(streams.parent < 0, -1, local[streams.parent])
    shape = np.stack([islands.place[streams.src], islands.place[streams.dst], *streams[2:4], parent, streams.turn], 1)[order]
    alike: dict[bytes, list[Ints]] = {}
    for lines in np.split(np.arange(len(order)), begin[1:]):
        alike.setdefault(shape[lines].tobytes(), []).append(order[lines])
    chosen = np.concatenate([copies[0] for copies in alike.values()])
    fill = fill_buckets if len(chosen) < MATCHED else first_fit
    found = fill(_some(streams, chosen), ranks, cap)
    pointer = np.searchsorted(found.stream, np.arange(len(chosen) + 1))
    out, at = [], 0
    for copies in alike.values():
        count = len(copies[0])
        part = slice(pointer[at], pointer[at + count])
        stream = found.stream[part] - at
        out += [(copy[stream], found.bucket[part], found.size[part]) for copy in copies]
        at += count
    return _rising(out)


def _cut(boxes: Boxes, contents: _Contents, portions: Portions, limit: int) -> Segments:
    """Lay the portions of each stream along its pieces; a piece is cut where a bucket ends."""
    streams = contents.streams
    size = contents.stop - contents.start
    before = np.concatenate([[0], np.cumsum(size)])
    until = np.cumsum(portions.size)  # over all streams, which hold the same bytes as their pieces
    ends = distinct(np.concatenate([until, before[1:]]))
    piece = np.searchsorted(before, ends, "left") - 1
    portion = np.searchsorted(until, ends, "left")
    stop = contents.start[piece] + ends - before[piece]
    stop = np.maximum(boxes.round_down(contents.cls[piece], stop, limit), contents.start[piece])
    final = ends == before[piece + 1]
    stop[final] = contents.stop[piece[final]]
    fresh = np.concatenate([[True], piece[1:] != piece[:-1]])
    start = np.where(fresh, contents.start[piece], np.concatenate([[0], stop[:-1]]))
    keep = stop > start
    stream, cls = portions.stream[portion[keep]], contents.cls[piece[keep]]
    return Segments(
        streams.src[stream].astype(np.int32), streams.dst[stream].astype(np.int32), cls.astype(np.int32), start[keep],
        stop[keep], portions.bucket[portion[keep]].astype(np.int32), streams.parent[stream] >= 0,
    )  # fmt: skip
