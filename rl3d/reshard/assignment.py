"""Generation slots for a run of ranks: least bytes for the busiest rank, then least in all.

Every slot is taken equally often, and groups must exist in which slots rise with rank: the n-th rank of a slot makes the
n-th group, so at no rank may a slot have been taken more often than the slot below it. What has been taken so far is then
all that matters for the rest, which makes the best assignment a shortest path.
"""

import numpy as np

from rl3d.reshard.boxes import Ints


def assign_slots(cost: Ints, block: int, tp: int) -> Ints | None:
    """Slot of each rank, within consecutive blocks of ``block`` ranks.

    Args:
        cost: ``(ranks, tp)`` bytes that a rank receives in a slot.
        block: ranks that share their slots among themselves; a multiple of ``tp``.
        tp: number of slots.

    Returns:
        The slots, or ``None`` when the ranks do not divide into blocks.
    """
    if len(cost) % block or block % tp:
        return None
    known: dict[bytes, list[int]] = {}
    out: list[int] = []
    for start in range(0, len(cost), block):
        part = np.ascontiguousarray(cost[start : start + block])
        if part.tobytes() not in known:
            known[part.tobytes()] = _assign(part.tolist(), block // tp, tp)
        out += known[part.tobytes()]
    return np.array(out, np.int64)


def _assign(cost: list[list[int]], times: int, tp: int) -> list[int]:
    limit = _search(cost, times, tp, None)[0]
    return _search(cost, times, tp, limit)[1]


def _search(cost: list[list[int]], times: int, tp: int, limit: int | None) -> tuple[int, list[int]]:
    """Best value and slots: the least maximum, or with ``limit`` the least sum where nothing exceeds it."""
    states: dict[tuple[int, ...], tuple[int, tuple[int, ...] | None, int]] = {(0,) * tp: (0, None, -1)}
    trail = [states]
    for line in cost:
        following: dict[tuple[int, ...], tuple[int, tuple[int, ...] | None, int]] = {}
        for taken, (value, _, _) in states.items():
            for slot in range(tp):
                if taken[slot] == (times if slot == 0 else taken[slot - 1]):
                    continue
                price = line[slot]
                if limit is not None and price > limit:
                    continue
                total = max(value, price) if limit is None else value + price
                after = (*taken[:slot], taken[slot] + 1, *taken[slot + 1 :])
                if after not in following or total < following[after][0]:
                    following[after] = (total, taken, slot)
        states = following
        trail.append(states)
    state: tuple[int, ...] | None = (times,) * tp
    best = trail[-1][(times,) * tp][0]
    slots: list[int] = []
    for layer in reversed(trail[1:]):
        assert state is not None
        _, state, slot = layer[state]
        slots.append(slot)
    return best, slots[::-1]
