"""What top-k, top-p and min-p leave of the logits, without sorting them and without the host.

Edges are sought in brackets (:mod:`rl3d.kernels.bracket`). A rank that has the whole vocabulary looks at it twice
(:mod:`rl3d.kernels.sift`). Ranks that share it look together, here: one pass over the logits sums up what lies above six
thresholds, the sums cross ranks, and a small kernel narrows the brackets and sets the next thresholds.

Sums of a block are fp32, of blocks fp64, in a fixed order: an edge does not depend on the batch. The torch twin, which
sorts, is :func:`rl3d.generation.filters.thresholds`.

Shape legend: B rows, V vocabulary columns of this shard, N blocks (of all shards where they are joined).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl3d.kernels import bracket, sift
from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl
from rl3d.kernels.bracket import BLOCK, REACH, THRESHOLDS, UNKNOWN

PASSES = 12
"""Six thresholds leave a seventh of a bracket: 64 nats become less than the last bit of a logit in 10 passes. Those who
find a single value earlier, after 4 to 7, have nothing to do in the others."""
_WIDE = 32  # of a row's state: lo, hi, limit, above lo, above hi in four columns each; then whole, best


@jit
def _extent(logits_ptr, temperature_ptr, out_ptr, width, valid, blocks, TEMPERED: constexpr, BLOCK: constexpr,
            OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
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
        x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
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
def _save(state, frame, lo, hi, limit, above_lo, above_hi, whole, COUNT: constexpr, THRESHOLDS: constexpr):
    """Keep the brackets, and set the next thresholds."""
    edge, i = tl.arange(0, 4), tl.arange(0, 8)
    tl.store(state + edge, lo)
    tl.store(state + 4 + edge, hi)
    tl.store(state + 8 + edge, limit)
    tl.store(state + 12 + edge, above_lo)
    tl.store(state + 16 + edge, above_hi)
    tl.store(frame + i, bracket.aims(lo, hi, THRESHOLDS).to(tl.float32), mask=i < THRESHOLDS)
    tl.store(frame + THRESHOLDS, tl.max(hi, axis=0).to(tl.float32))
    tl.store(frame + THRESHOLDS + 1, bracket.unsettled(lo, hi, above_lo, above_hi, whole, COUNT))


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
        above = bracket.outside(hi, above_hi) + _joined(parts_ptr, row, blocks, THRESHOLDS, WIDTH)
        at = tl.load(frame + i, mask=i < THRESHOLDS, other=float("inf")).to(tl.float64)
        lo, hi, above_lo, above_hi = bracket.moved(at, above, lo, hi, limit, above_lo, above_hi)
        _save(state, frame, lo, hi, limit, above_lo, above_hi, tl.load(state + 20), COUNT, THRESHOLDS)


@jit
def _open_ranks(extent_ptr, state_ptr, frame_ptr, temperature_ptr, top_k_ptr, blocks, size, UNKNOWN: constexpr,
                REACH: constexpr, WIDE: constexpr, THRESHOLDS: constexpr, WIDTH: constexpr,
                OVERLAP: constexpr):  # fmt: skip
    """Join the extents of all blocks, and begin with top-k: less than k entries lie above its edge."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    frame, state = frame_ptr + row * 8, state_ptr + row * WIDE
    whole, best = bracket.whole_and_best(extent_ptr, row, blocks, WIDTH)
    tl.store(state + 20, whole)
    tl.store(state + 21, best)
    top_k = tl.load(top_k_ptr + row)
    filters = bracket.has_ranks(tl.load(temperature_ptr + row), top_k, size)
    lo, hi = bracket.of_ranks(filters, best, REACH)
    none = tl.zeros((4,), dtype=tl.float64)
    above_lo = none + tl.where(filters, UNKNOWN, 0.0)
    _save(state, frame, lo, hi, none + top_k.to(tl.float64), above_lo, none, whole, True, THRESHOLDS)


@jit
def _beyond(logits_ptr, temperature_ptr, ranks_ptr, out_ptr, width, valid, blocks, WIDE: constexpr, TEMPERED: constexpr,
            BLOCK: constexpr, OVERLAP: constexpr):  # fmt: skip
    """Probability above the lower end of top-k's bracket: of what it leaves."""
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = bracket.scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED)
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
        mass = bracket.scalar(_joined(beyond_ptr, row, blocks, 1, WIDTH), 0)
        total = bracket.left_by_ranks(
            mass, floor, tl.load(ranks + 4), tl.load(ranks + 8), tl.load(ranks + 12), whole, UNKNOWN
        )
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    lo, hi, limit = bracket.of_nucleus(tl.load(temperature_ptr + row), top_p, whole, best, floor, total, size, margin)
    above_lo = tl.where(hi > lo, UNKNOWN, 0.0)
    tl.store(state + 20, whole)
    _save(state, frame, lo, hi, limit, above_lo, above_lo * 0, whole, False, THRESHOLDS)


@jit
def _cut(ranks_ptr, nucleus_ptr, temperature_ptr, min_p_ptr, out_ptr, margin, NUCLEUS: constexpr, WIDE: constexpr,
         OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    edge = tl.arange(0, 4)
    ranks_lo = tl.load(ranks_ptr + row * WIDE + edge)
    nucleus_lo = ranks_lo
    if NUCLEUS:
        nucleus_lo = tl.load(nucleus_ptr + row * WIDE + edge)
    found = bracket.least(ranks_lo, nucleus_lo, tl.load(ranks_ptr + row * WIDE + 21), tl.load(temperature_ptr + row),
                          tl.load(min_p_ptr + row), margin)  # fmt: skip
    tl.store(out_ptr + row * 3 + edge, found, mask=edge < 3)


@dataclass
class Shard:
    """Logits that filters look at: this rank's columns of a batch, and how its sums meet those of other ranks.

    Attributes:
        logits_BV: fp32 or a 16-bit dtype, rows contiguous; columns from ``valid`` on are padding.
        size: of the whole vocabulary.
        temperature_B: fp32; rows of 0 are not filtered. ``tempered``: whether any is neither 0 nor 1.
        gather: joins [B, n, m] of all ranks along dimension 1; ``None`` where this rank has the whole vocabulary.
    """

    logits_BV: Tensor
    valid: int
    size: int
    temperature_B: Tensor
    gather: Callable[[Tensor], Tensor] | None
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
        return out if self.gather is None else self.gather(out).contiguous()


@dataclass
class Filters:
    """What each row asks for.

    Attributes:
        top_k_B: int64, 0 or the size of the vocabulary for none; ``ranked`` says whether any row has one.
        top_p_B: fp32, 1 for none; ``nucleus`` says whether any row has one.
        min_p_B: fp32, 0 for none.
        margin: of the probability (top-p) and of the logit (min-p).
    """

    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    margin: float
    ranked: bool
    nucleus: bool


def filter_edges(shard: Shard, filters: Filters) -> Tensor:
    """Smallest logit over the temperature that may be drawn, fp32 [B, 3]: with filters tighter by their margin, as they are,
    and looser by it. Top-k, then top-p on what top-k left, renormalised, then min-p; ties with the last stay. Nothing waits
    for the host. Only for Triton."""
    rows, device = len(shard.logits_BV), shard.logits_BV.device
    out = torch.empty(rows, 3, dtype=torch.float32, device=device)
    if not rows:
        return out
    extent = shard.launch(_extent, torch.empty(rows, shard.blocks(), 2, dtype=torch.float64, device=device))
    if shard.gather is None:
        sift.edges(shard, filters, extent, out)
    else:
        _together(shard, filters, extent, out)
    return out


def _together(shard: Shard, filters: Filters, extent: Tensor, out: Tensor) -> None:
    rows, device, blocks = len(out), out.device, shard.blocks()
    ranks, inner = (torch.empty(rows, _WIDE, dtype=torch.float64, device=device) for _ in range(2))
    frame = torch.empty(rows, 8, dtype=torch.float32, device=device)
    sums = torch.zeros(rows, blocks, THRESHOLDS, dtype=torch.float32, device=device)
    grid, total = (rows,), extent.shape[1]
    shape: dict[str, int] = {"WIDE": _WIDE, "THRESHOLDS": THRESHOLDS}
    alone: dict[str, int] = {"WIDTH": block_of(total), "num_warps": 1, **overlap(device)}

    def search(state: Tensor, count: bool) -> None:
        for _ in range(PASSES):
            every = shard.launch(_above, sums, state, frame, COUNT=count, **shape)
            _narrow[grid](every, state, frame, total, COUNT=count, **shape, **alone)

    temperature_B = shard.temperature_B
    _open_ranks[grid](extent, ranks, frame, temperature_B, filters.top_k_B, total, shard.size, UNKNOWN=UNKNOWN, REACH=REACH,
                      **shape, **alone)  # fmt: skip
    if filters.ranked:
        search(ranks, True)
    if filters.nucleus:
        left = sums
        if filters.ranked:
            left = torch.empty(rows, blocks, 1, dtype=torch.float32, device=device)
            left = shard.launch(_beyond, left, ranks, WIDE=_WIDE)
        _open_nucleus[grid](left, ranks, inner, frame, temperature_B, filters.top_p_B, total, shard.size, filters.margin,
                            RANKED=filters.ranked, UNKNOWN=UNKNOWN, **shape, **alone)  # fmt: skip
        search(inner, False)
    _cut[grid](ranks, inner, temperature_B, filters.min_p_B, out, filters.margin, NUCLEUS=filters.nucleus, WIDE=_WIDE,
               num_warps=1, **overlap(device))  # fmt: skip
