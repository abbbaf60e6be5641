"""Filling buckets: which streams travel in which, so that nobody idles while another has a queue.

Bucket after bucket, the ranks with most left to send or receive are served first, in rounds of a greedy matching: a
sender proposes its most urgent stream, a receiver accepts its most urgent proposal. Serving the most loaded ranks is what
keeps the number of buckets near what the busiest rank alone would need (the classical argument for open shops). Where
loads are equal, rank to next rank comes first, then to the one after: every rank sends to one and receives from one.
"""

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints
from rl3d.reshard.streams import ALIGN, Portions, Streams


def fill_buckets(streams: Streams, ranks: int, cap: int) -> Portions:
    """Cut streams into portions so that no rank sends, or receives, more than ``cap`` bytes in a bucket."""
    left = streams.size.copy()
    done = np.zeros_like(left)
    load = np.stack([np.bincount(end, left, ranks).astype(np.int64) for end in (streams.src, streams.dst)])
    count = len(left)
    place = np.empty(count, np.int64)
    place[np.argsort(streams.turn, kind="stable")] = np.arange(count)
    alive = np.arange(count)
    out: list[tuple[Ints, Ints, Ints]] = []
    bucket = 0
    crumb = cap // 16
    while True:
        alive = alive[left[alive] > 0]
        if not len(alive):
            break
        src, dst, parent = streams.src[alive], streams.dst[alive], streams.parent[alive]
        ready = np.where(parent < 0, left[alive], np.minimum(done[parent] - done[alive], left[alive]))
        urgency = np.maximum(load[0, src], load[1, dst]) // max(cap // 8, 1)
        order = np.argsort(place[alive] - urgency * count, kind="stable")
        order = order[ready[order] > 0]
        line, amount = _match(src[order], dst[order], ready[order], streams.slack[alive[order]], ranks, cap, crumb)
        chosen, amount = alive[order[line]], amount
        times = _steady(chosen, amount, ready[order[line]], left, streams.parent, load, cap)
        for _ in range(times):
            out.append((chosen, np.full(len(chosen), bucket), amount))
            bucket += 1
        left[chosen] -= amount * times  # a stream travels once in a bucket
        done[chosen] += amount * times
        for side, end in ((0, streams.src), (1, streams.dst)):
            load[side] -= np.bincount(end[chosen], amount * times, ranks).astype(np.int64)
    if not out:
        none = np.zeros(0, np.int64)
        return Portions(none, none, none)
    stream, where, size = (np.concatenate([o[k] for o in out]) for k in range(3))
    order = np.argsort(stream, kind="stable")
    return Portions(stream[order], where[order], size[order])


def _match(src: Ints, dst: Ints, ready: Ints, slack: Ints, ranks: int, cap: int, crumb: int) -> tuple[Ints, Ints]:
    """Fill one bucket: (line, bytes) of the streams that travel, each once. Lines come most urgent first."""
    room = np.full((2, ranks), cap, np.int64)
    open_lines = np.arange(len(src))
    lines, amounts = [], []
    while len(open_lines):
        s, d = src[open_lines], dst[open_lines]
        fits = np.minimum(room[0, s], room[1, d]) - slack[open_lines]
        fits = np.minimum(ready[open_lines], fits // ALIGN * ALIGN)
        # A crumb of room is not worth a message of its own.
        good = (fits > 0) & (fits >= np.minimum(ready[open_lines], crumb))
        open_lines, s, d, fits = open_lines[good], s[good], d[good], fits[good]
        if not len(open_lines):
            break
        # Of equal indices the last assignment stays, so going backwards the first, most urgent line does.
        back = np.arange(len(open_lines))[::-1]
        best = np.full(ranks, -1)
        best[s[::-1]] = back
        proposed = np.sort(best[best >= 0])
        best = np.full(ranks, -1)
        best[d[proposed][::-1]] = proposed[::-1]
        accepted = best[best >= 0]
        lines.append(open_lines[accepted])
        amounts.append(fits[accepted])
        used = -(-(fits[accepted] + slack[open_lines[accepted]]) // ALIGN) * ALIGN
        room[0, s[accepted]] -= used
        room[1, d[accepted]] -= used
        keep = np.ones(len(open_lines), bool)
        keep[accepted] = False
        open_lines = open_lines[keep]
    return np.concatenate(lines), np.concatenate(amounts)


def _steady(chosen: Ints, amount: Ints, ready: Ints, left: Ints, parents: Ints, load: NDArray[np.int64], cap: int) -> int:
    """How many buckets may look the same: until a stream ends or runs dry, and only while loads stay alike."""
    most = min(int((left[chosen] // amount).min()), int(load.max()) // cap // 32)
    if most <= 1:
        return 1
    parent = parents[chosen]
    handed = np.flatnonzero(parent >= 0)
    if len(handed):
        order = np.argsort(chosen)
        at = order[np.searchsorted(chosen, parent[handed], sorter=order).clip(max=len(chosen) - 1)]
        fed = np.where(chosen[at] == parent[handed], amount[at], 0)
        starving = handed[fed < amount[handed]]
        if len(starving):
            most = min(most, int((ready[starving] // amount[starving]).min()))
    return max(1, most)
