"""When everything is sent: buckets under the staging cap, few large messages, nobody idle while another has a queue.

A stream is all that one rank sends to another, in layer order. In a bucket a rank may send and receive as many bytes as
fit its two staging buffers. Streams are taken in rotation (rank to next rank, to the one after, ...), so that within one
turn every rank sends to one and receives from one, and each fills the first buckets with room at both ends.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints, distinct
from rl3d.reshard.routing import Pieces
from rl3d.reshard.traffic import Boxes

ALIGN = 16
"""Messages start at multiples of this many bytes in staging memory; staging is budgeted as if every box did."""


class Segments(NamedTuple):
    """Columns of the finished plan: bytes ``start`` to ``stop`` of a class go from ``src`` to ``dst`` in ``bucket``.

    ``bucket`` is -1 and ``src == dst`` for what a rank keeps. ``relay`` as in :class:`Pieces`.
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


class _Items(NamedTuple):
    """What is placed in one go, one line each; ``turn`` groups those that share no sender and no receiver."""

    src: Ints
    dst: Ints
    size: Ints
    slack: Ints
    release: Ints
    turn: Ints


class _Rooms:
    """Free staging of every rank and bucket, for sending and for receiving."""

    def __init__(self, ranks: int, cap: int, buckets: int) -> None:
        self.cap = cap
        self.free = np.full((2, ranks, max(buckets, 1)), cap, np.int64)
        self.first = np.zeros((2, ranks), np.int64)
        """No bucket before this one has room worth mentioning."""

    def _grow(self, buckets: int) -> None:
        have = self.free.shape[2]
        if buckets > have:
            more = np.full((*self.free.shape[:2], max(buckets, 2 * have) - have), self.cap, np.int64)
            self.free = np.concatenate([self.free, more], axis=2)

    def place(self, src: Ints, dst: Ints, size: Ints, slack: Ints, release: Ints) -> tuple[Ints, Ints, Ints]:
        """First fit, split where a bucket is full; (line, bucket, bytes) in the order of the buckets of each line."""
        left, at = size.copy(), np.maximum(np.maximum(self.first[0, src], self.first[1, dst]), release)
        active = np.flatnonzero(left > 0)
        out: list[tuple[Ints, Ints, Ints]] = []
        while len(active):
            s, d = src[active], dst[active]
            width = int(min(max(left[active].max() // self.cap + 2, 4), 512))
            self._grow(int(at[active].max()) + width)
            window = at[active][:, None] + np.arange(width)
            room = np.minimum(self.free[0, s[:, None], window], self.free[1, d[:, None], window]) - slack[active][:, None]
            # A crumb of room is not worth a message of its own.
            worth = np.minimum(left[active], self.cap // 16)[:, None]
            room = np.where(room >= worth, room // ALIGN * ALIGN, 0)
            taken = np.clip(left[active][:, None] - (np.cumsum(room, 1) - room), 0, room)
            line, column = np.nonzero(taken)
            amount = taken[line, column]
            used = -(-(amount + slack[active][line]) // ALIGN) * ALIGN
            bucket = window[line, column]
            self.free[0, s[line], bucket] -= used
            self.free[1, d[line], bucket] -= used
            out.append((active[line], bucket, amount))
            left[active] -= taken.sum(1)
            at[active] += width
            active = active[left[active] > 0]
        for side, ranks in ((0, src), (1, dst)):
            self._advance(side, ranks)
        if len(out) == 1:
            return out[0]
        line, bucket, amount = (np.concatenate([o[k] for o in out]) for k in range(3))
        order = np.lexsort((bucket, line))
        return line[order], bucket[order], amount[order]

    def _advance(self, side: int, ranks: Ints) -> None:
        crumb = self.cap // 16 if self.cap >= 1024 else 1
        while len(ranks):
            first = self.first[side, ranks]
            inside = first < self.free.shape[2]
            ranks, first = ranks[inside], first[inside]
            ranks = ranks[self.free[side, ranks, first] < crumb]
            self.first[side, ranks] += 1


def schedule(boxes: Boxes, pieces: Pieces, first: Ints, ranks: int, staging_bytes: int) -> Segments:
    """Cut pieces into segments and give each a bucket.

    Args:
        boxes: the classes' contents, which say where boxes may be cut.
        pieces: who sends what to whom.
        first: place in layer order of each class.
        ranks: number of ranks.
        staging_bytes: most bytes that a rank sends, or receives, in one bucket.
    """
    limit = staging_bytes // 64
    grain = boxes.grain(limit)
    rooms = _Rooms(ranks, staging_bytes, _expected_buckets(pieces, ranks, staging_bytes))
    direct = pieces.take(~pieces.relay)
    order = np.lexsort((direct.start, direct.cls, first[direct.cls], direct.dst, direct.src))
    sent = _place(boxes, direct.take(order), np.zeros(len(order), np.int64), grain, limit, rooms, whole_streams=True)
    if not pieces.relay.any():
        return sent
    onward, release = _follow(sent, pieces.take(pieces.relay))
    handed = _place(boxes, onward, release, grain, limit, rooms, whole_streams=False)
    return sent.join(handed)


def _expected_buckets(pieces: Pieces, ranks: int, cap: int) -> int:
    most = 0
    for side in (pieces.src, pieces.dst):
        most = max(most, int(np.bincount(side, pieces.stop - pieces.start, ranks).max(initial=0)))
    return most // cap * 9 // 8 + 8


def _place(
    boxes: Boxes, pieces: Pieces, release: Ints, grain: Ints, limit: int, rooms: _Rooms, whole_streams: bool
) -> Segments:
    """Items are whole streams, or pieces one by one where each has a time before which it cannot be sent."""
    size = pieces.stop - pieces.start
    if not len(size):
        empty = np.zeros(0, np.int64)
        short = empty.astype(np.int32)
        return Segments(short, short, short, empty, empty, short, np.zeros(0, np.bool_))
    head = np.ones(len(size), bool)
    if whole_streams:
        head[1:] = (np.diff(pieces.src) != 0) | (np.diff(pieces.dst) != 0)
    begin = np.flatnonzero(head)
    slack = np.maximum.reduceat(grain[pieces.cls], begin)
    slack = np.minimum(slack, max(limit, 8))
    src, dst = pieces.src[begin], pieces.dst[begin]
    items = _Items(src, dst, np.add.reduceat(size, begin), slack, release[begin], _turns(src, dst))
    line, bucket, amount = _run(items, rooms)

    # Bytes of a line are laid along its pieces; a piece is cut where a bucket ends.
    order = np.lexsort((bucket, line))
    line, bucket, amount = line[order], bucket[order], amount[order]
    before = np.concatenate([[0], np.cumsum(size)])
    until = np.cumsum(amount)  # over all lines: lines hold the same bytes as their pieces, in the same order
    ends = distinct(np.concatenate([until, before[1:]]))
    piece = np.searchsorted(before, ends, "left") - 1
    where = bucket[np.searchsorted(until, ends, "left")]
    stop = pieces.start[piece] + ends - before[piece]
    stop = boxes.round_down(pieces.cls[piece], stop, limit)
    final = ends == before[piece + 1]
    stop[final] = pieces.stop[piece][final]
    stop = np.maximum(stop, pieces.start[piece])
    fresh = np.concatenate([[True], piece[1:] != piece[:-1]])
    start = np.where(fresh, pieces.start[piece], np.concatenate([[0], stop[:-1]]))
    keep = stop > start
    piece = piece[keep]
    return Segments(
        pieces.src[piece].astype(np.int32), pieces.dst[piece].astype(np.int32), pieces.cls[piece].astype(np.int32),
        start[keep], stop[keep], where[keep].astype(np.int32), pieces.relay[piece],
    )  # fmt: skip


def _turns(src: Ints, dst: Ints) -> Ints:
    """Turn of each stream: how far its receiver is behind its sender, counted among the ranks that are connected."""
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
    order = np.lexsort((np.arange(ranks), root))
    place = np.empty(ranks, np.int64)
    start = np.concatenate([[0], np.flatnonzero(np.diff(root[order])) + 1])
    count = np.diff(np.concatenate([start, [ranks]]))
    place[order] = np.arange(ranks) - np.repeat(start, count)
    members = np.empty(ranks, np.int64)
    members[order] = np.repeat(count, count)
    turn = (place[dst] - place[src]) % members[dst]
    # the n-th item of one sender and receiver comes in the n-th round of turns
    key = src * ranks + dst
    order = np.argsort(key, kind="stable")
    heads = np.concatenate([[True], np.diff(key[order]) != 0])
    nth = np.empty(len(src), np.int64)
    nth[order] = np.arange(len(src)) - np.maximum.accumulate(np.where(heads, np.arange(len(src)), 0))
    return nth * ranks + turn


def _run(items: _Items, rooms: _Rooms) -> tuple[Ints, Ints, Ints]:
    order = np.argsort(items.turn, kind="stable")
    cuts = np.flatnonzero(np.diff(items.turn[order])) + 1
    out = []
    for lines in np.split(order, cuts):
        line, bucket, amount = rooms.place(
            items.src[lines], items.dst[lines], items.size[lines], items.slack[lines], items.release[lines]
        )
        out.append((lines[line], bucket, amount))
    line, bucket, amount = (np.concatenate([o[k] for o in out]) for k in range(3))
    return line, bucket, amount


def _follow(sent: Segments, relayed: Pieces) -> tuple[Pieces, Ints]:
    """Cut what is handed on where its arrival was cut; it can leave in the bucket after the one it arrived in."""
    wide = int(max(relayed.src.max(), sent.dst.max(initial=0))) + 1
    arrived = np.lexsort((sent.start, sent.dst, sent.cls))
    group = sent.cls[arrived].astype(np.int64) * wide + sent.dst[arrived]
    # One number that rises with class, receiver and position, to search in
    span = int(max(sent.stop.max(initial=0), relayed.stop.max())) + 1
    groups = distinct(group)
    begins = np.searchsorted(groups, group) * span + sent.start[arrived]
    mine = np.searchsorted(groups, relayed.cls * wide + relayed.src) * span
    low = np.searchsorted(begins, mine + relayed.start, "right") - 1
    high = np.searchsorted(begins, mine + relayed.stop, "left")
    count = high - low
    index = np.repeat(np.arange(len(count)), count)
    part = low[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(relayed.start[index], sent.start[arrived][part])
    stop = np.minimum(relayed.stop[index], sent.stop[arrived][part])
    release = sent.bucket[arrived][part].astype(np.int64) + 1
    order = np.lexsort((start, relayed.cls[index], release, relayed.dst[index], relayed.src[index]))
    pieces = Pieces(relayed.src[index], relayed.dst[index], relayed.cls[index], start, stop, np.ones(len(index), np.bool_))
    return pieces.take(order), release[order]
