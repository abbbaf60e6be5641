"""Who computes what: samples over data-parallel ranks, and a rank's samples over rows of tokens, as evenly as possible.

Everything is deterministic and depends on lengths only, so that all ranks work out the same shares without talking.
"""

import heapq
from collections.abc import Sequence


def split_for_dp(costs: Sequence[float], dp: int) -> list[list[int]]:
    """Share samples among data-parallel ranks so that their work is balanced: dearest first to the least loaded (LPT).

    The busiest rank gets at most 4/3 of the best possible (Graham 1969). Numbers of samples may differ; every rank gets
    at least one when there are enough. ``costs`` is any measure of work, such as tokens or FLOPs. Returns ascending
    indices into ``costs`` for each rank. Raises ``ValueError`` for ``dp`` below 1.
    """
    if dp < 1:
        raise ValueError(f"dp={dp} must be at least 1")
    shares: list[list[int]] = [[] for _ in range(dp)]
    # An empty share goes before any other, whatever the loads: no rank is left without work needlessly.
    heap: list[tuple[bool, float, int]] = [(False, 0, rank) for rank in range(dp)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        _, load, rank = heapq.heappop(heap)
        shares[rank].append(index)
        heapq.heappush(heap, (True, load + costs[index], rank))
    return [sorted(share) for share in shares]


def pack(lengths: Sequence[int], token_budget: int, pad_to_multiple: int = 1, at_least: int = 0) -> list[list[int]]:
    """Distribute sequences over as few rows of at most ``token_budget`` tokens as first-fit decreasing finds, evenly.

    A sequence is never split; one that is longer than the budget gets a row of its own. Rows of equal length keep the
    stages of a pipeline equally busy and the peak of the activations low. Where sequences fit into the rows but not
    evenly, there is one row more.

    Args:
        lengths: tokens of each sequence.
        token_budget: most tokens in one row, padding included.
        pad_to_multiple: rows are padded to a multiple of this (tensor-parallel sharding of the sequence).
        at_least: number of rows to make at least; when there are too few sequences, empty rows are added.

    Returns indices into ``lengths`` for each row, fullest row first, ascending in a row. Raises ``ValueError`` for a
    budget or a length below 1.
    """
    if token_budget < 1 or pad_to_multiple < 1:
        raise ValueError(f"token_budget={token_budget} and pad_to_multiple={pad_to_multiple} must be at least 1")
    if any(length < 1 for length in lengths):
        raise ValueError(f"sequence {min(range(len(lengths)), key=lengths.__getitem__)} is empty; leave it out")
    capacity = max(token_budget // pad_to_multiple * pad_to_multiple, 1)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(_first_fit(lengths, longest_first, capacity), at_least)
    while (rows := _spread(lengths, longest_first, capacity, count)) is None:
        count += 1
    return rows


def _first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> int:
    room: list[int] = []
    for index in order:
        fitting = next((row for row, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            room.append(capacity - lengths[index])
        else:
            room[fitting] -= lengths[index]
    return len(room)


def _spread(lengths: Sequence[int], order: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """Each sequence to the emptiest of ``count`` rows; ``None`` when that overfills a row."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, row) for row in range(count)]
    for index in order:
        load, row = heapq.heappop(heap)
        if rows[row] and load + lengths[index] > capacity:
            return None
        rows[row].append(index)
        heapq.heappush(heap, (load + lengths[index], row))
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    return [sorted(row) for row in rows]


def pack_shares(lengths: Sequence[int], shares: Sequence[Sequence[int]], token_budget: int, pad_to_multiple: int = 1,
                stages: int = 1, rounds: int = 1) -> list[list[list[int]]]:  # fmt: skip
    """Rows of every data-parallel rank, in equal numbers as far as each has sequences for them, and one at least.

    Args:
        lengths: tokens of each sequence of the global batch.
        shares: indices of each rank's sequences (:func:`split_for_dp`).
        token_budget, pad_to_multiple: see :func:`pack`.
        stages: pipeline stages; fewer rows than stages would leave some of them idle throughout.
        rounds: rows come in multiples of this where a schedule adds empty ones otherwise (interleaved stages).

    Returns indices into ``lengths``: ``[rank][row]``. Ranks without sequences get one empty row.
    """

    def rows_of(share: Sequence[int], at_least: int) -> list[list[int]]:
        return pack([lengths[i] for i in share], token_budget, pad_to_multiple, max(min(at_least, len(share)), 1))

    most = max(len(rows_of(share, stages)) for share in shares)
    count = -(-most // rounds) * rounds
    return [[[share[i] for i in row] for row in rows_of(share, count)] for share in shares]


def seqlen_spread(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens of the data-parallel ranks under verl's names (``log_seqlen_unbalance``).

    ``global_seqlen/min`` and ``max`` are what equal runs of the batch as it came would have; ``balanced_min`` and
    ``balanced_max`` what ``shares`` have.
    """
    dp, count = len(shares), len(lengths)
    plain = [sum(lengths[rank * count // dp : (rank + 1) * count // dp]) for rank in range(dp)]
    balanced = [sum(lengths[i] for i in share) for share in shares]
    return {
        "global_seqlen/min": float(min(plain)),
        "global_seqlen/max": float(max(plain)),
        "global_seqlen/minmax_diff": float(max(plain) - min(plain)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(lengths) / dp,
    }
