"""The edges of top-k and top-p where one rank has the whole vocabulary: two looks at the logits, whatever they are.

1. Extents (:mod:`rl3d.kernels.threshold`): the partition function and the best logit of each row.
2. A guess: one program a row counts a sample of the logits, runs of eight at even distances, into bins, and says between
   which two values the edges surely lie. What lies below an edge is estimated, not what lies above it: a sample may miss the
   few entries that have most of the probability, and they are not below.
3. A sift: what lies above the guess is summed up, what lies inside is kept, as it comes.
4. The end: one program a row finds the edges among what was kept (:mod:`rl3d.kernels.bracket`), and proves the guess: sums
   above its ends are on the right sides of every limit.
5. Rows whose guess was wrong, or held more than there is room for (many equal logits), are sought in all their logits, a
   program a row. The others leave that kernel at once.

Sums are over a row alone, and in a fixed order or of whole numbers: an edge does not depend on the batch, nor on the order
in which entries were kept.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl3d.kernels import bracket
from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl
from rl3d.kernels.bracket import BLOCK, REACH, THRESHOLDS, UNKNOWN

if TYPE_CHECKING:
    from rl3d.kernels.threshold import Filters, Shard

SAMPLE = 8192
ROOM = 16384
"""Entries of a row that are kept. Between the two ends that are guessed lie some hundreds where few tokens have most of the
probability, and 9,000 in the middle of a flat distribution over 150,000."""
_BINS = 512
_SURE = 4.0  # standard deviations of an estimate: three rows in 100,000 are sought in all their logits
_MISSED = 12.0  # so many entries for each one looked at are all missed by a sample once in 160,000 times
_STEPS = 20  # 64 nats, a third of a bracket each, are less than the last bit of a logit
_RUN = 8  # fp32 logits of 32 bytes, the least that memory moves
_CHUNK = 2048
_APART = 64  # int32 between the counters of two rows: 256 bytes, so that one part of the L2 cache does not count for all
_SCALE = 2.0**40  # of probabilities in whole numbers


@jit
def _guess(logits_ptr, temperature_ptr, extent_ptr, top_k_ptr, top_p_ptr, out_ptr, counts_ptr, width, valid, blocks, period,
           size, margin, SURE: constexpr, MISSED: constexpr, REACH: constexpr, RUN: constexpr, BINS: constexpr,
           SAMPLE: constexpr, RANKED: constexpr, NUCLEUS: constexpr, APART: constexpr, TEMPERED: constexpr, WIDTH: constexpr,
           OVERLAP: constexpr):  # fmt: skip
    """Write lo, hi (-inf where the row has neither filter), the log partition function and the best logit, fp64 [4]."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    whole, best = bracket.whole_and_best(extent_ptr, row, blocks, WIDTH)
    temperature = tl.load(temperature_ptr + row)
    lo, hi = -float("inf") + whole * 0, -float("inf") + whole * 0
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row)
    ranked, nucleus = temperature < 0, temperature < 0
    if RANKED:
        ranked = bracket.has_ranks(temperature, top_k, size)
    if NUCLEUS:
        nucleus = (temperature > 0) & (top_p < 1)
    if ranked | nucleus:
        i, b = tl.arange(0, SAMPLE), tl.arange(0, BINS)
        column = i // RUN * period * RUN + i % RUN
        x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
        lowest = tl.min(tl.where(x == -float("inf"), best.to(tl.float32), x), axis=0)
        reach = tl.maximum(tl.minimum(best - lowest, REACH), 1e-6)
        step = reach / BINS
        bin_ = tl.minimum((best.to(tl.float32) - x) / step.to(tl.float32), BINS - 1.0).to(tl.int32)
        counts = tl.histogram(tl.minimum(tl.maximum(bin_, 0), BINS - 1), BINS)
        counts -= tl.where(b == BINS - 1, tl.sum((column >= valid).to(tl.int32), axis=0), 0)
        counts = counts.to(tl.float32)
        more = period * 1.0 - 1.0  # unseen entries for each seen one
        upper = best - b.to(tl.float64) * step  # of each bin
        if ranked:
            above = tl.cumsum(counts, axis=0) - counts  # seen above each bin's upper end
            share = top_k.to(tl.float32) / period
            spread = tl.where(more > 0, SURE * tl.sqrt(share) + SURE * SURE, 0.0)
            last = tl.min(tl.where(above >= share + spread, b, BINS), axis=0)
            lo = best - tl.where(last < BINS, last.to(tl.float64) * step, REACH)
            hi = best
            if nucleus == 0:  # a nucleus of what top-k leaves wants all of it
                few = above + tl.where(more > 0, SURE * tl.sqrt(above) + SURE * SURE, 0.0) < share
                first = tl.max(tl.where(few, b, 0), axis=0)
                hi = best - first.to(tl.float64) * step
        else:
            weight = tl.exp(upper - whole).to(tl.float32)
            tail = tl.cumsum(counts * weight, axis=0, reverse=True) * period
            squares = tl.cumsum(counts * weight * weight, axis=0, reverse=True) * period * more
            error = SURE * tl.sqrt(squares)
            less = tail * tl.exp(-step).to(tl.float32) - error
            most = tail + error + MISSED * more * weight
            outside = 1 - top_p
            last = tl.min(tl.where(most < (outside - margin).to(tl.float32), b, BINS), axis=0)
            first = tl.max(tl.where(less > (outside + margin).to(tl.float32), b, 0), axis=0)
            everything = whole + tl.log(tl.maximum(outside - margin, 1e-30) / size) - 0.01
            lo = tl.where(last < BINS, best - last.to(tl.float64) * step, everything)
            lo = tl.maximum(lo, everything)
            hi = best - first.to(tl.float64) * step
        lo, hi = lo.to(tl.float32).to(tl.float64), hi.to(tl.float32).to(tl.float64)
    at = out_ptr + row * 4
    tl.store(at, lo)
    tl.store(at + 1, hi)
    tl.store(at + 2, whole)
    tl.store(at + 3, best)
    tl.store(counts_ptr + row * APART, 0)


@jit
def _sift(logits_ptr, temperature_ptr, guess_ptr, kept_ptr, counts_ptr, parts_ptr, width, valid, blocks, ROOM: constexpr,
          RANKED: constexpr, APART: constexpr, TEMPERED: constexpr, BLOCK: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lo, hi = tl.load(guess_ptr + row * 4).to(tl.float32), tl.load(guess_ptr + row * 4 + 1).to(tl.float32)
    whole, best = tl.load(guess_ptr + row * 4 + 2).to(tl.float32), tl.load(guess_ptr + row * 4 + 3).to(tl.float32)
    if hi > lo:
        four = tl.arange(0, 4)[None, :]  # of one thread, which asks once for the places of all of them
        column = block * BLOCK + tl.arange(0, BLOCK // 4)[:, None] * 4 + four
        x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
        inside = ((x > lo) & (x <= hi)).to(tl.int32)
        fours = tl.sum(inside, axis=1)
        place = tl.atomic_add(counts_ptr + row * APART + fours * 0, fours, mask=fours > 0, sem="relaxed")
        place = place[:, None] + tl.cumsum(inside, axis=1) - 1
        tl.store(kept_ptr + row * ROOM + place, x, mask=(inside > 0) & (place < ROOM))
        if hi < best:
            at = parts_ptr + (row * blocks + block) * 2
            if RANKED:
                tl.store(at, tl.sum(tl.sum((x > hi).to(tl.int32), axis=1), axis=0).to(tl.float32))
            tl.store(at + 1, tl.sum(tl.sum(tl.where(x > hi, tl.exp(x - whole), 0.0), axis=1), axis=0))


@jit
def _kept_above(kept_ptr, count, at, whole, COUNT: constexpr, SCALE: constexpr, CHUNK: constexpr):
    """Of what was kept, entries above each threshold or their probability. In whole numbers, whose order does not matter:
    entries are kept as they come."""
    found = tl.zeros((8,), dtype=tl.int64)
    at = at.to(tl.float32)[:, None]
    for first in range(0, count, CHUNK):
        place = first + tl.arange(0, CHUNK)[None, :]
        x = tl.load(kept_ptr + place, mask=place < count, other=-float("inf"))
        if COUNT:
            found += tl.sum((x > at).to(tl.int32), axis=1).to(tl.int64)
        else:
            weight = (tl.exp(x - whole.to(tl.float32)) * SCALE).to(tl.int64)
            found += tl.sum(tl.where(x > at, weight, 0), axis=1)
    if COUNT:
        return found.to(tl.float64)
    return found.to(tl.float64) / SCALE


@jit
def _among(kept_ptr, count, beyond, start, lo, hi, limit, whole, COUNT: constexpr, THRESHOLDS: constexpr, STEPS: constexpr,
           SCALE: constexpr, CHUNK: constexpr):  # fmt: skip
    """Brackets, all from ``start`` on, that hold one value of what was kept; so much lies beyond the largest. And what lay
    above their lower ends at first and does at the end."""
    from_start = tl.zeros((8,), dtype=tl.float64) + start
    inside = bracket.scalar(_kept_above(kept_ptr, count, from_start, whole, COUNT, SCALE, CHUNK), 0)
    above_lo = tl.where(hi > lo, beyond + inside, 0.0)
    first, above_hi = above_lo, tl.where(hi > lo, beyond, 0.0)
    for _ in range(STEPS):
        if bracket.unsettled(lo, hi, above_lo, above_hi, whole, COUNT) > 0:
            at = bracket.aims(lo, hi, THRESHOLDS)
            above = beyond + _kept_above(kept_ptr, count, at, whole, COUNT, SCALE, CHUNK)
            lo, hi, above_lo, above_hi = bracket.moved(at, above, lo, hi, limit, above_lo, above_hi)
    return lo, hi, first, above_lo


@jit
def _settle(guess_ptr, kept_ptr, counts_ptr, parts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, left_ptr,
            blocks, size, margin, RANKED: constexpr, NUCLEUS: constexpr, ROOM: constexpr, APART: constexpr, WIDTH: constexpr,
            THRESHOLDS: constexpr, STEPS: constexpr, SCALE: constexpr, CHUNK: constexpr, UNKNOWN: constexpr,
            OVERLAP: constexpr):  # fmt: skip
    """Edges among what was kept; rows of which that cannot be said are left."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    guess_lo, guess_hi = tl.load(guess_ptr + row * 4), tl.load(guess_ptr + row * 4 + 1)
    whole, best = tl.load(guess_ptr + row * 4 + 2), tl.load(guess_ptr + row * 4 + 3)
    temperature, none = tl.load(temperature_ptr + row), tl.zeros((4,), dtype=tl.float64)
    ranks_lo, nucleus_lo = none - float("inf"), none - float("inf")
    wrong = none
    if RANKED | NUCLEUS:
        kept_ptr += row * ROOM
        kept = tl.load(counts_ptr + row * APART)
        wrong += tl.where(kept > ROOM, 1.0, 0.0)
        kept = tl.where(kept > ROOM, 0, kept)
        block = tl.arange(0, WIDTH)
        parts = parts_ptr + (row * blocks + block) * 2
        there = block < tl.where((guess_hi > guess_lo) & (guess_hi < best), blocks, 0)  # of others nothing lies beyond
        mass = tl.sum(tl.load(parts + 1, mask=there, other=0.0).to(tl.float64), axis=0)
        floor, total = none - float("inf"), none + 1.0
        if RANKED:
            over = tl.sum(tl.load(parts, mask=there, other=0.0), axis=0).to(tl.float64)
            top_k = tl.load(top_k_ptr + row)
            ranked = bracket.has_ranks(temperature, top_k, size)
            limit = none + top_k.to(tl.float64)
            lo, hi = none + tl.where(ranked, guess_lo, -float("inf")), none + tl.where(ranked, guess_hi, -float("inf"))
            sought = none + tl.where(ranked, 1.0, 0.0) > 0
            ranks_lo, hi, first, above = _among(kept_ptr, kept, over, guess_lo, lo, hi, limit, whole, True, THRESHOLDS,
                                                STEPS, SCALE, CHUNK)  # fmt: skip
            wrong += tl.where(sought & ((over >= limit) | (first < limit)), 1.0, 0.0)
            floor = ranks_lo
            if NUCLEUS:
                at = tl.zeros((8,), dtype=tl.float64) + tl.max(floor, axis=0)
                beyond = mass + bracket.scalar(_kept_above(kept_ptr, kept, at, whole, False, SCALE, CHUNK), 0)
                total = bracket.left_by_ranks(beyond, ranks_lo, hi, limit, above, whole, UNKNOWN)
        if NUCLEUS:
            top_p = tl.load(top_p_ptr + row).to(tl.float64)
            lo, hi, limit = bracket.of_nucleus(temperature, top_p, whole, best, floor, total, size, margin)
            sought = hi > lo
            lo = tl.where(sought, tl.maximum(lo, guess_lo), lo)
            hi = tl.where(sought, tl.minimum(hi, guess_hi), hi)
            start = tl.max(tl.where(sought, lo, -float("inf")), axis=0)
            nucleus_lo, hi, first, above = _among(kept_ptr, kept, mass, start, lo, hi, limit, whole, False, THRESHOLDS,
                                                  STEPS, SCALE, CHUNK)  # fmt: skip
            wrong += tl.where(sought & ((mass >= limit) | (first < limit)), 1.0, 0.0)
    found = bracket.least(ranks_lo, nucleus_lo, best, temperature, tl.load(min_p_ptr + row), margin)
    edge = tl.arange(0, 4)
    tl.store(out_ptr + row * 3 + edge, found, mask=edge < 3)
    tl.store(left_ptr + row, tl.max(wrong, axis=0).to(tl.float32))


@jit
def _everywhere(logits_ptr, temperature_ptr, row, width, valid, blocks, lo, hi, limit, whole, COUNT: constexpr,
                TEMPERED: constexpr, THRESHOLDS: constexpr, STEPS: constexpr, UNKNOWN: constexpr,
                BLOCK: constexpr):  # fmt: skip
    """Brackets that hold one value of the row, and what lies above their lower ends."""
    i = tl.arange(0, 8)
    above_lo = tl.where(hi > lo, UNKNOWN, 0.0).to(tl.float64)
    above_hi = above_lo * 0
    for _ in range(STEPS):
        if bracket.unsettled(lo, hi, above_lo, above_hi, whole, COUNT) > 0:
            at = bracket.aims(lo, hi, THRESHOLDS)
            above = tl.zeros((8,), dtype=tl.float64) + bracket.outside(hi, above_hi)
            top = tl.max(hi, axis=0).to(tl.float32)
            for block in range(blocks):
                column = block * BLOCK + tl.arange(0, BLOCK)
                x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
                weight = tl.where((column < valid) & (x <= top), 1.0, 0.0)
                if not COUNT:
                    weight *= tl.exp(x - whole.to(tl.float32))
                for j in tl.static_range(THRESHOLDS):
                    over = tl.sum(tl.where(x > bracket.scalar(at, j).to(tl.float32), weight, 0.0), axis=0)
                    above += tl.where(i == j, over.to(tl.float64), 0.0)
            lo, hi, above_lo, above_hi = bracket.moved(at, above, lo, hi, limit, above_lo, above_hi)
    return lo, hi, above_lo


@jit
def _seek(logits_ptr, temperature_ptr, guess_ptr, top_k_ptr, top_p_ptr, min_p_ptr, left_ptr, out_ptr, width, valid, blocks,
          size, margin, RANKED: constexpr, NUCLEUS: constexpr, TEMPERED: constexpr, THRESHOLDS: constexpr, STEPS: constexpr,
          REACH: constexpr, UNKNOWN: constexpr, BLOCK: constexpr, OVERLAP: constexpr):  # fmt: skip
    """Edges of the rows that are left, in all their logits."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(left_ptr + row) > 0:
        whole, best = tl.load(guess_ptr + row * 4 + 2), tl.load(guess_ptr + row * 4 + 3)
        temperature, none = tl.load(temperature_ptr + row), tl.zeros((4,), dtype=tl.float64)
        ranks_lo, nucleus_lo, total = none - float("inf"), none - float("inf"), none + 1.0
        if RANKED:
            top_k = tl.load(top_k_ptr + row)
            limit = none + top_k.to(tl.float64)
            lo, hi = bracket.of_ranks(bracket.has_ranks(temperature, top_k, size), best, REACH)
            ranks_lo, hi, above = _everywhere(logits_ptr, temperature_ptr, row, width, valid, blocks, lo, hi, limit, whole,
                                              True, TEMPERED, THRESHOLDS, STEPS, UNKNOWN, BLOCK)  # fmt: skip
            floor, beyond = tl.max(ranks_lo, axis=0).to(tl.float32), whole * 0
            for block in range(blocks):
                column = block * BLOCK + tl.arange(0, BLOCK)
                x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
                kept = tl.where((column < valid) & (x > floor), tl.exp(x - whole.to(tl.float32)), 0.0)
                beyond += tl.sum(kept, axis=0).to(tl.float64)
            total = bracket.left_by_ranks(beyond, ranks_lo, hi, limit, above, whole, UNKNOWN)
        if NUCLEUS:
            top_p = tl.load(top_p_ptr + row).to(tl.float64)
            lo, hi, limit = bracket.of_nucleus(temperature, top_p, whole, best, ranks_lo, total, size, margin)
            nucleus_lo, hi, above = _everywhere(logits_ptr, temperature_ptr, row, width, valid, blocks, lo, hi, limit, whole,
                                                False, TEMPERED, THRESHOLDS, STEPS, UNKNOWN, BLOCK)  # fmt: skip
        found = bracket.least(ranks_lo, nucleus_lo, best, temperature, tl.load(min_p_ptr + row), margin)
        edge = tl.arange(0, 4)
        tl.store(out_ptr + row * 3 + edge, found, mask=edge < 3)


def edges(shard: "Shard", filters: "Filters", extent_BN2: Tensor, out_B3: Tensor) -> None:
    """Write :func:`rl3d.kernels.threshold.filter_edges` of a shard that is the whole vocabulary.

    ``extent_BN2``: of each block the log of the sum of all exponentials, and the largest logit, fp64.
    """
    logits_BV, temperature_B, device = shard.logits_BV, shard.temperature_B, out_B3.device
    rows, blocks = len(logits_BV), shard.blocks()
    guess = torch.empty(rows, 4, dtype=torch.float64, device=device)
    kept, counts = torch.empty(rows, ROOM, device=device), torch.empty(rows, _APART, dtype=torch.int32, device=device)
    parts, left = torch.empty(rows, blocks, 2, device=device), torch.empty(rows, device=device)
    stride, grid, extra = logits_BV.stride(0), (rows,), overlap(device)
    wanted = {"RANKED": filters.ranked, "NUCLEUS": filters.nucleus}
    search: dict[str, int | float] = {"THRESHOLDS": THRESHOLDS, "STEPS": _STEPS, "UNKNOWN": UNKNOWN}
    logits: tuple[Tensor, Tensor] = logits_BV, temperature_B
    asked = filters.top_k_B, filters.top_p_B
    _guess[grid](*logits, extent_BN2, *asked, guess, counts, stride, shard.valid, blocks, -(-shard.valid // SAMPLE),
                 shard.size, filters.margin, SURE=_SURE, MISSED=_MISSED, REACH=REACH, RUN=_RUN, BINS=_BINS, SAMPLE=SAMPLE,
                 APART=_APART, WIDTH=block_of(blocks), TEMPERED=shard.tempered, num_warps=16, **wanted,
                 **extra)  # fmt: skip
    if filters.ranked or filters.nucleus:
        _sift[rows, blocks](*logits, guess, kept, counts, parts, stride, shard.valid, blocks, ROOM=ROOM, APART=_APART,
                            RANKED=filters.ranked, TEMPERED=shard.tempered, BLOCK=BLOCK, num_warps=16, **extra)  # fmt: skip
    _settle[grid](guess, kept, counts, parts, temperature_B, *asked, filters.min_p_B, out_B3, left, blocks, shard.size,
                  filters.margin, ROOM=ROOM, APART=_APART, WIDTH=block_of(blocks), SCALE=_SCALE, CHUNK=_CHUNK, num_warps=8,
                  **wanted, **search, **extra)  # fmt: skip
    if filters.ranked or filters.nucleus:
        _seek[grid](*logits, guess, *asked, filters.min_p_B, left, out_B3, stride, shard.valid, blocks, shard.size,
                    filters.margin, TEMPERED=shard.tempered, REACH=REACH, BLOCK=BLOCK, num_warps=16, **wanted, **search,
                    **extra)  # fmt: skip
