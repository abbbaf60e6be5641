"""Filling buckets when there are very many streams: each goes where there is room first.

Matching looks at all streams for every bucket, which is too much where everybody sends to everybody. Here streams are
taken once, in rotation (rank to next rank, to the one after, ...), so that those taken together share no sender and no
receiver, and each fills the first buckets with room at both ends.
"""

import numpy as np

from rl3d.reshard.boxes import Ints
from rl3d.reshard.streams import ALIGN, Portions, Streams


def first_fit(streams: Streams, ranks: int, cap: int) -> Portions:
    """As :func:`rl3d.reshard.rounds.fill_buckets`; what is handed on travels after all of it has arrived."""
    rooms = _Rooms(ranks, cap)
    last = np.full(len(streams.src), -1)
    parts: list[tuple[Ints, Ints, Ints]] = []
    for handed in (False, True):
        chosen = np.flatnonzero((streams.parent >= 0) == handed)
        src, dst = streams.src[chosen], streams.dst[chosen]
        # In one turn a sender has one receiver and a receiver one sender; the n-th streams of such a pair go together.
        turn = (dst - src) % ranks if handed else streams.turn[chosen]
        again = _nth(src * ranks + dst)
        key = turn * (int(again.max(initial=0)) + 1) + again
        order = np.argsort(key, kind="stable")
        for lines in np.split(chosen[order], np.flatnonzero(np.diff(key[order])) + 1):
            release = last[streams.parent[lines]] + 1 if handed else np.zeros(len(lines), np.int64)
            for stream, bucket, size in rooms.place(streams, lines, release):
                parts.append((stream, bucket, size))
                np.maximum.at(last, stream, bucket)
    stream, bucket, size = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((bucket, stream))
    return Portions(stream[order], bucket[order], size[order])


def _nth(key: Ints) -> Ints:
    """How many equal keys come before each."""
    order = np.argsort(key, kind="stable")
    position = np.arange(len(key))
    head = np.concatenate([[True], np.diff(key[order]) != 0])[: len(key)]
    out = np.empty(len(key), np.int64)
    out[order] = position - np.maximum.accumulate(np.where(head, position, 0))
    return out


class _Rooms:
    """Free staging of every rank and bucket, for sending and for receiving."""

    def __init__(self, ranks: int, cap: int) -> None:
        self.cap = cap
        self.free = np.full((2, ranks, 64), cap, np.int64)
        self.first = np.zeros((2, ranks), np.int64)
        """No bucket before this one has room worth mentioning."""

    def place(self, streams: Streams, lines: Ints, release: Ints) -> list[tuple[Ints, Ints, Ints]]:
        """(stream, bucket, bytes) of streams that share no sender and no receiver."""
        src, dst, slack, left = streams.src[lines], streams.dst[lines], streams.slack[lines], streams.size[lines].copy()
        at = np.maximum(np.maximum(self.first[0, src], self.first[1, dst]), release)
        active, out = np.arange(len(lines)), []
        while len(active):
            s, d = src[active], dst[active]
            width = int(min(max(int(left[active].max()) // self.cap + 2, 4), 256))
            self._grow(int(at[active].max()) + width)
            window = at[active][:, None] + np.arange(width)
            room = np.minimum(self.free[0, s[:, None], window], self.free[1, d[:, None], window]) - slack[active][:, None]
            # A crumb of room is not worth a message of its own.
            worth = np.minimum(left[active], self.cap // 16)[:, None]
            room = np.where(room >= worth, room // ALIGN * ALIGN, 0)
            taken = np.clip(left[active][:, None] - (np.cumsum(room, 1) - room), 0, room)
            line, column = np.nonzero(taken)
            amount, bucket = taken[line, column], window[line, column]
            used = -(-(amount + slack[active[line]]) // ALIGN) * ALIGN
            self.free[0, s[line], bucket] -= used
            self.free[1, d[line], bucket] -= used
            out.append((lines[active[line]], bucket, amount))
            left[active] -= taken.sum(1)
            at[active] += width
            active = active[left[active] > 0]
        for side, ranks in ((0, src), (1, dst)):
            self._advance(side, ranks)
        return out

    def _grow(self, buckets: int) -> None:
        have = self.free.shape[2]
        if buckets > have:
            more = np.full((*self.free.shape[:2], max(buckets, 2 * have) - have), self.cap, np.int64)
            self.free = np.concatenate([self.free, more], axis=2)

    def _advance(self, side: int, ranks: Ints) -> None:
        while len(ranks):
            ranks = ranks[self.first[side, ranks] < self.free.shape[2]]
            ranks = ranks[self.free[side, ranks, self.first[side, ranks]] < max(self.cap // 64, 1)]
            self.first[side, ranks] += 1
