"""What top-k, top-p and min-p leave of the logits, without sorting them and without the host.

An edge is the smallest logit above which there is less than a limit, of entries (top-k) or of probability (top-p). It is
sought in a bracket (lo, hi]: one pass over the logits sums up what lies above six thresholds inside, a small kernel
narrows the bracket and sets the next six, until one value is left. Three edges of a row are sought together, in four
columns of which the last repeats the third; nearly always they share their bracket to the end.

Sums of a block are fp32, of blocks fp64, in a fixed order: an edge does not depend on the batch. The torch twin, which
sorts, is :func:`rl3d.generation.filters.thresholds`.

Shape legend: B rows, V vocabulary columns of this shard, N blocks (of all shards where they are joined).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl

BLOCK = 4096
PASSES = 12
"""Six thresholds leave a seventh of a bracket: 64 nats become less than the last bit of a logit in 10 passes. Those who
find a single value earlier, after 4 to 7, have nothing to do in the others."""
_THRESHOLDS = 6
_UNKNOWN = 1e30  # what lies above the lower end of a bracket that no pass has met
_REACH = 64.0  # an entry so far below the best is never drawn: noise spans 46.6 (rl3d.generation.noise)
_WIDE = 32  # of a row's state: lo, hi, limit, above lo, above hi in four columns each; then whole, best


@jit
def _scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED: constexpr, BLOCK: constexpr):
    """Logits over the temperature, rounded as the draw rounds them; -inf behind the shard's end."""
    x = tl.load(logits_ptr + row * width + column, mask=column < valid, other=-float("inf")).to(tl.float32)
    if not TEMPERED:
        return x
    temperature = tl.load(temperature_ptr + row)
    return tl.div_rn(x, tl.zeros((BLOCK,), dtype=tl.float32) + tl.where(temperature > 0, temperature, 1.0))


@jit
def _extent(logits_ptr, temperature_ptr, out_ptr, width, valid, blocks, TEMPERED: constexpr, BLOCK: constexpr,
            OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED, BLOCK)
    best = tl.max(x, axis=0)
    top = tl.maximum(best, -3e38)
    at = out_ptr + (row * blocks + block) * 2
    tl.store(at, (top + tl.log(tl.sum(tl.exp(x - top), axis=0))).to(tl.float64))
    tl.store(at + 1, best.to(tl.float64))


@jit
def _above(logits_ptr, temperature_ptr, state_ptr, frame_ptr, out_ptr, width, valid, blocks, COUNT: constexpr,
           WIDE: constexpr, THRESHOLDS: constexpr, TEMPERED: constexpr, BLOCK: constexpr, OVERLAP: constexpr):  # fmt: skip
    """Entries, or their probability, above each of the frame's thresholds and not above its end."""
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    frame = frame_ptr + row * 8
    if tl.load(frame + THRESHOLDS + 1) > 0:
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED, BLOCK)
        inside = (column < valid) & (x <= tl.load(frame + THRESHOLDS))
        weight = tl.where(inside, 1.0, 0.0)
        if not COUNT:
            weight = tl.where(inside, tl.exp(x - tl.load(state_ptr + row * WIDE + 20).to(tl.float32)), 0.0)
        for i in tl.static_range(THRESHOLDS):
            over = tl.where(x > tl.load(frame + i), weight, 0.0)
            tl.store(out_ptr + (row * blocks + block) * THRESHOLDS + i, tl.sum(over, axis=0))


@jit
def _joined(parts_ptr, row, blocks, COLUMNS: constexpr, WIDTH: constexpr):
    """Sums over all blocks, fp64 [8], of what they say of up to eight thresholds."""
    block, i = tl.arange(0, WIDTH)[:, None], tl.arange(0, 8)[None, :]
    inside = (block < blocks) & (i < COLUMNS)
    return tl.sum(tl.load(parts_ptr + (row * blocks + block) * COLUMNS + i, mask=inside, other=0.0).to(tl.float64), axis=0)


@jit
def _after(x):
    """The next larger fp32, of fp64 that hold fp32; infinite ones stay."""
    narrow = x.to(tl.float32)
    bits = narrow.to(tl.int32, bitcast=True)
    moved = tl.where(narrow > 0, bits + 1, tl.where(narrow < 0, bits - 1, 1)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(narrow) == float("inf"), narrow, moved).to(tl.float64)


@jit
def _save(state, frame, lo, hi, limit, above_lo, above_hi, whole, COUNT: constexpr, THRESHOLDS: constexpr):
    """Keep the brackets [4], and set the next thresholds: six in the one that all edges share, or two in each of three."""
    edge, i = tl.arange(0, 4), tl.arange(0, 8)
    tl.store(state + edge, lo)
    tl.store(state + 4 + edge, hi)
    tl.store(state + 8 + edge, limit)
    tl.store(state + 12 + edge, above_lo)
    tl.store(state + 16 + edge, above_hi)
    one = tl.exp(lo - whole)  # the least that an entry above lo weighs
    if COUNT:
        one = tl.zeros((4,), dtype=tl.float64) + 1.0
    several = (hi > _after(lo)) & (above_lo - above_hi > 1.5 * one)
    apart = (tl.max(lo, axis=0) > tl.min(lo, axis=0)) | (tl.max(hi, axis=0) > tl.min(hi, axis=0))
    mine = edge[:, None] == i[None, :] // 2
    low = tl.sum(tl.where(mine, lo[:, None], 0.0), axis=0)
    high = tl.sum(tl.where(mine, hi[:, None], 0.0), axis=0)
    low = tl.where(apart, low, tl.min(lo, axis=0))
    high = tl.where(apart, high, tl.max(hi, axis=0))
    part = tl.where(apart, (i % 2 + 1).to(tl.float64) / 3, (i + 1).to(tl.float64) / (THRESHOLDS + 1))
    found = low + tl.where(high > low, (high - low) * part, 0.0)
    tl.store(frame + i, found.to(tl.float32), mask=i < THRESHOLDS)
    tl.store(frame + THRESHOLDS, tl.max(hi, axis=0).to(tl.float32))
    tl.store(frame + THRESHOLDS + 1, tl.max(tl.where(several, 1.0, 0.0), axis=0))


@jit
def _narrow(parts_ptr, state_ptr, frame_ptr, blocks, COUNT: constexpr, WIDE: constexpr, THRESHOLDS: constexpr,
            WIDTH: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    frame, state = frame_ptr + row * 8, state_ptr + row * WIDE
    if tl.load(frame + THRESHOLDS + 1) > 0:
        edge, i = tl.arange(0, 4), tl.arange(0, 8)
        lo, hi, limit = tl.load(state + edge), tl.load(state + 4 + edge), tl.load(state + 8 + edge)
        above_lo, above_hi = tl.load(state + 12 + edge), tl.load(state + 16 + edge)
        top = tl.max(hi, axis=0)
        base = tl.min(tl.where(hi == top, above_hi, 1e30), axis=0)  # what passes leave out lies above all brackets
        above = (base + _joined(parts_ptr, row, blocks, THRESHOLDS, WIDTH))[None, :]
        at = tl.load(frame + i, mask=i < THRESHOLDS, other=float("inf")).to(tl.float64)[None, :]
        within = (at > lo[:, None]) & (at < hi[:, None])
        down = within & (above < limit[:, None])
        up = within & (above >= limit[:, None])
        new_hi = tl.minimum(hi, tl.min(tl.where(down, at, float("inf")), axis=1))
        new_lo = tl.maximum(lo, tl.max(tl.where(up, at, -float("inf")), axis=1))
        at_hi = tl.max(tl.where(down & (at == new_hi[:, None]), above, 0.0), axis=1)
        at_lo = tl.max(tl.where(up & (at == new_lo[:, None]), above, 0.0), axis=1)
        above_hi = tl.where(new_hi < hi, at_hi, above_hi)
        above_lo = tl.where(new_lo > lo, at_lo, above_lo)
        _save(state, frame, new_lo, new_hi, limit, above_lo, above_hi, tl.load(state + 20), COUNT, THRESHOLDS)


@jit
def _open_ranks(extent_ptr, state_ptr, frame_ptr, temperature_ptr, top_k_ptr, blocks, size, UNKNOWN: constexpr,
                REACH: constexpr, WIDE: constexpr, THRESHOLDS: constexpr, WIDTH: constexpr,
                OVERLAP: constexpr):  # fmt: skip
    """Join the extents of all blocks, and begin with top-k: less than k entries lie above its edge."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    frame, state = frame_ptr + row * 8, state_ptr + row * WIDE
    block = tl.arange(0, WIDTH)
    lse = tl.load(extent_ptr + (row * blocks + block) * 2, mask=block < blocks, other=-float("inf"))
    best = tl.max(tl.load(extent_ptr + (row * blocks + block) * 2 + 1, mask=block < blocks, other=-float("inf")), axis=0)
    top = tl.maximum(tl.max(lse, axis=0), -1e300)
    whole = top + tl.log(tl.sum(tl.exp(lse - top), axis=0))
    tl.store(state + 20, whole)
    tl.store(state + 21, best)
    top_k = tl.load(top_k_ptr + row)
    filters = (tl.load(temperature_ptr + row) > 0) & (top_k > 0) & (top_k < size)
    none = tl.zeros((4,), dtype=tl.float64)
    lo = none + tl.where(filters, (best - REACH).to(tl.float32).to(tl.float64), -float("inf"))
    hi = none + tl.where(filters, best, -float("inf"))
    above_lo = none + tl.where(filters, UNKNOWN, 0.0)
    _save(state, frame, lo, hi, none + top_k.to(tl.float64), above_lo, none, whole, True, THRESHOLDS)


@jit
def _beyond(logits_ptr, temperature_ptr, ranks_ptr, out_ptr, width, valid, blocks, WIDE: constexpr, TEMPERED: constexpr,
            BLOCK: constexpr, OVERLAP: constexpr):  # fmt: skip
    """Probability above the lower end of top-k's bracket: of what it leaves."""
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED, BLOCK)
    whole, lo = tl.load(ranks_ptr + row * WIDE + 20).to(tl.float32), tl.load(ranks_ptr + row * WIDE).to(tl.float32)
    mass = tl.where((column < valid) & (x > lo), tl.exp(x - whole), 0.0)
    tl.store(out_ptr + row * blocks + block, tl.sum(mass, axis=0))


@jit
def _open_nucleus(beyond_ptr, ranks_ptr, state_ptr, frame_ptr, temperature_ptr, top_p_ptr, blocks, size, margin,
                  RANKED: constexpr, UNKNOWN: constexpr, WIDE: constexpr, THRESHOLDS: constexpr,
                  WIDTH: constexpr, OVERLAP: constexpr):  # fmt: skip
    """Begin with top-p, of what top-k left: tighter by the margin, as it is, looser by it."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    frame, state, ranks = frame_ptr + row * 8, state_ptr + row * WIDE, ranks_ptr + row * WIDE
    whole, best, floor = tl.load(ranks + 20), tl.load(ranks + 21), tl.load(ranks)
    total = whole * 0.0 + 1.0
    if RANKED:
        left, top_k = tl.load(ranks + 12), tl.load(ranks + 8)
        mass = tl.sum(tl.where(tl.arange(0, 8) == 0, _joined(beyond_ptr, row, blocks, 1, WIDTH), 0.0), axis=0)
        ties = tl.where((left > top_k) & (left < UNKNOWN / 2), left - top_k, 0.0)  # of the k-th, more than there is room for
        ranked = tl.abs(floor) != float("inf")
        total = tl.where(ranked, mass - tl.where(ranked, ties * tl.exp(tl.load(ranks + 4) - whole), 0.0), 1.0)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    filters = (tl.load(temperature_ptr + row) > 0) & (top_p < 1)
    step = tl.minimum(tl.arange(0, 4), 2) - 1
    share = top_p + step.to(tl.float64) * margin
    widest = tl.where(top_p + margin < 1, top_p + margin, top_p)
    # all entries down to there together are less than what the nucleus leaves out
    lowest = whole + tl.log((1 - tl.where(filters, widest, 0.0)) / size) - 0.01
    lo = tl.zeros((4,), dtype=tl.float64) + tl.maximum(lowest, floor).to(tl.float32).to(tl.float64)
    hi = tl.zeros((4,), dtype=tl.float64) + best
    everything = (share >= 1) | (filters == 0)
    lo = tl.where(everything, -float("inf"), tl.where(share > 0, tl.minimum(lo, hi), hi))
    hi = tl.where(everything, -float("inf"), hi)
    above_lo = tl.where(hi > lo, UNKNOWN, 0.0)
    tl.store(state + 20, whole)
    _save(state, frame, lo, hi, share * total, above_lo, above_lo * 0, whole, False, THRESHOLDS)


@jit
def _cut(ranks_ptr, nucleus_ptr, temperature_ptr, min_p_ptr, out_ptr, margin, NUCLEUS: constexpr, WIDE: constexpr,
         OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    edge = tl.arange(0, 4)
    best = tl.load(ranks_ptr + row * WIDE + 21)
    least = _after(tl.load(ranks_ptr + row * WIDE + edge))
    if NUCLEUS:
        least = tl.maximum(least, _after(tl.load(nucleus_ptr + row * WIDE + edge)))
    min_p = tl.load(min_p_ptr + row)
    share = tl.where((tl.load(temperature_ptr + row) > 0) & (min_p > 0), min_p, 1.0)
    # in fp32 as torch's operations have it
    floor = best.to(tl.float32) + tl.log(share.to(tl.float64)).to(tl.float32)
    floor = tl.where((tl.load(temperature_ptr + row) > 0) & (min_p > 0), floor, -float("inf")).to(tl.float64)
    least = tl.minimum(tl.maximum(least, floor - (edge - 1).to(tl.float64) * margin), best)  # the best always stays
    tl.store(out_ptr + row * 3 + edge, least.to(tl.float32), mask=edge < 3)


@dataclass
class Shard:
    """Logits that filters look at: this rank's columns of a batch, and how its sums meet those of other ranks.

    Attributes:
        logits_BV: fp32 or a 16-bit dtype, rows contiguous; columns from ``valid`` on are padding.
        size: of the whole vocabulary.
        temperature_B: fp32; rows of 0 are not filtered. ``tempered``: whether any is neither 0 nor 1.
        gather: joins [B, n, m] of all ranks along dimension 1.
    """

    logits_BV: Tensor
    valid: int
    size: int
    temperature_B: Tensor
    gather: Callable[[Tensor], Tensor]
    tempered: bool = True

    def blocks(self) -> int:
        """Blocks of every rank's shard, padding included: as many everywhere."""
        return -(-self.logits_BV.shape[1] // BLOCK)

    def launch(self, kernel: Any, out: Tensor, *state: Tensor, **options: Any) -> Tensor:
        """Run a kernel over rows and blocks; what all ranks' blocks found."""
        grid = (len(self.logits_BV), self.blocks())
        options |= {"TEMPERED": self.tempered, "BLOCK": BLOCK, "num_warps": 8, **overlap(out.device)}
        kernel[grid](self.logits_BV, self.temperature_B, *state, out, self.logits_BV.stride(0), self.valid, self.blocks(),
                     **options)  # fmt: skip
        return self.gather(out).contiguous()


def filter_edges(shard: Shard, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, margin: float, *, ranked: bool,
                 nucleus: bool) -> Tensor:  # fmt: skip
    """Smallest logit over the temperature that may be drawn, fp32 [B, 3]: with filters tighter by ``margin``, as they are,
    and looser by it. Top-k, then top-p on what top-k left, renormalised, then min-p; ties with the last stay. Nothing waits
    for the host. Only for Triton.

    Args:
        top_k_B: int64, 0 or the size of the vocabulary for none; ``ranked`` says whether any row has one.
        top_p_B: fp32, 1 for none; ``nucleus`` says whether any row has one.
        min_p_B: fp32, 0 for none.
        margin: of the probability (top-p) and of the logit (min-p).
    """
    rows, device = len(shard.logits_BV), shard.logits_BV.device
    out = torch.empty(rows, 3, dtype=torch.float32, device=device)
    if not rows:
        return out
    blocks = shard.blocks()
    extent = shard.launch(_extent, torch.empty(rows, blocks, 2, dtype=torch.float64, device=device))
    ranks, inner = (torch.empty(rows, _WIDE, dtype=torch.float64, device=device) for _ in range(2))
    frame = torch.empty(rows, 8, dtype=torch.float32, device=device)
    sums = torch.zeros(rows, blocks, _THRESHOLDS, dtype=torch.float32, device=device)
    grid, total = (rows,), extent.shape[1]
    shape: dict[str, int] = {"WIDE": _WIDE, "THRESHOLDS": _THRESHOLDS}
    alone: dict[str, int] = {"WIDTH": block_of(total), "num_warps": 1, **overlap(device)}

    def search(state: Tensor, count: bool) -> None:
        for _ in range(PASSES):
            every = shard.launch(_above, sums, state, frame, COUNT=count, **shape)
            _narrow[grid](every, state, frame, total, COUNT=count, **shape, **alone)

    temperature_B = shard.temperature_B
    _open_ranks[grid](extent, ranks, frame, temperature_B, top_k_B, total, shard.size, UNKNOWN=_UNKNOWN, REACH=_REACH,
                      **shape, **alone)  # fmt: skip
    if ranked:
        search(ranks, True)
    if nucleus:
        left = sums
        if ranked:
            left = torch.empty(rows, blocks, 1, dtype=torch.float32, device=device)
            left = shard.launch(_beyond, left, ranks, WIDE=_WIDE)
        _open_nucleus[grid](left, ranks, inner, frame, temperature_B, top_p_B, total, shard.size, margin, RANKED=ranked,
                            UNKNOWN=_UNKNOWN, **shape, **alone)  # fmt: skip
        search(inner, False)
    _cut[grid](ranks, inner, temperature_B, min_p_B, out, margin, NUCLEUS=nucleus, WIDE=_WIDE, num_warps=1,
               **overlap(device))  # fmt: skip
    return out
