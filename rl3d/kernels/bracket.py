"""Where a filter's edge is sought: brackets that narrow. Functions that kernels call, and what they have in common.

An edge is the smallest logit above which there is less than a limit, of entries (top-k) or of probability (top-p). It lies
in a bracket (lo, hi]: sums above six thresholds inside make it narrower, until one value is left. Three edges of a row
(tighter by a margin, as it is, looser) are sought together, in four columns of which the last repeats the third; nearly
always they share their bracket to the end.

Brackets, limits and sums are fp64 [4], thresholds fp64 [8] that hold fp32 values, of which six are used.
"""

from rl3d.kernels.backend import constexpr, jit, tl

BLOCK = 4096
THRESHOLDS = 6
REACH = 64.0  # an entry so far below the best is never drawn: noise spans 46.6 (rl3d.generation.noise)
UNKNOWN = 1e30  # what lies above the lower end of a bracket that no sum has met


@jit
def scaled(logits_ptr, temperature_ptr, row, width, column, valid, TEMPERED: constexpr):
    """Logits over the temperature, rounded as the draw rounds them; -inf behind the shard's end."""
    x = tl.load(logits_ptr + row * width + column, mask=column < valid, other=-float("inf")).to(tl.float32)
    if not TEMPERED:
        return x
    temperature = tl.load(temperature_ptr + row)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@jit
def after(x):
    """The next larger fp32, of fp64 that hold fp32; infinite ones stay."""
    narrow = x.to(tl.float32)
    bits = narrow.to(tl.int32, bitcast=True)
    moved = tl.where(narrow > 0, bits + 1, tl.where(narrow < 0, bits - 1, 1)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(narrow) == float("inf"), narrow, moved).to(tl.float64)


@jit
def whole_and_best(extent_ptr, row, blocks, WIDTH: constexpr):
    """Log of the sum of all exponentials and the largest logit, of what each block has of them."""
    block = tl.arange(0, WIDTH)
    lse = tl.load(extent_ptr + (row * blocks + block) * 2, mask=block < blocks, other=-float("inf"))
    best = tl.max(tl.load(extent_ptr + (row * blocks + block) * 2 + 1, mask=block < blocks, other=-float("inf")), axis=0)
    top = tl.maximum(tl.max(lse, axis=0), -1e300)
    return top + tl.log(tl.sum(tl.exp(lse - top), axis=0)), best


@jit
def has_ranks(temperature, top_k, size):
    return (temperature > 0) & (top_k > 0) & (top_k < size)


@jit
def of_ranks(filters, best, REACH: constexpr):
    """First bracket of top-k, or an empty one."""
    none = tl.zeros((4,), dtype=tl.float64)
    lo = none + tl.where(filters, (best - REACH).to(tl.float32).to(tl.float64), -float("inf"))
    return lo, none + tl.where(filters, best, -float("inf"))


@jit
def left_by_ranks(mass, lo, hi, limit, above_lo, whole, UNKNOWN: constexpr):
    """Probability that top-k leaves, of all that lies above its edge's bracket and of the bracket."""
    ties = tl.where((above_lo > limit) & (above_lo < UNKNOWN / 2), above_lo - limit, 0.0)  # of the k-th, too many
    ranked = tl.abs(lo) != float("inf")
    return tl.where(ranked, mass - tl.where(ranked, ties * tl.exp(hi - whole), 0.0), 1.0)


@jit
def of_nucleus(temperature, top_p, whole, best, floor, total, size, margin):
    """First brackets of top-p: of a nucleus smaller by the margin, as it is, larger; and their limits. ``floor``: the lower
    end of top-k's bracket, -inf without; ``total``: the probability that it leaves."""
    filters = (temperature > 0) & (top_p < 1)
    step = tl.minimum(tl.arange(0, 4), 2) - 1
    share = top_p + step.to(tl.float64) * margin
    widest = tl.where(top_p + margin < 1, top_p + margin, top_p)
    # all entries down to there together are less than what the nucleus leaves out
    lowest = whole + tl.log((1 - tl.where(filters, widest, 0.0)) / size) - 0.01
    lo = tl.zeros((4,), dtype=tl.float64) + tl.maximum(lowest, floor).to(tl.float32).to(tl.float64)
    hi = tl.zeros((4,), dtype=tl.float64) + best
    everything = (share >= 1) | (filters == 0)
    lo = tl.where(everything, -float("inf"), tl.where(share > 0, tl.minimum(lo, hi), hi))
    return lo, tl.where(everything, -float("inf"), hi), share * total


@jit
def unsettled(lo, hi, above_lo, above_hi, whole, COUNT: constexpr):
    """Whether any bracket may hold more than one value."""
    one = tl.exp(lo - whole)  # the least that an entry above lo weighs
    if COUNT:
        one = tl.zeros((4,), dtype=tl.float64) + 1.0
    several = (hi > after(lo)) & (above_lo - above_hi > 1.5 * one)
    return tl.max(tl.where(several, 1.0, 0.0), axis=0)


@jit
def aims(lo, hi, THRESHOLDS: constexpr):
    """The next thresholds: six in the bracket that all edges share, or two in each of three; +inf in the two left."""
    edge, i = tl.arange(0, 4), tl.arange(0, 8)
    apart = (tl.max(lo, axis=0) > tl.min(lo, axis=0)) | (tl.max(hi, axis=0) > tl.min(hi, axis=0))
    mine = edge[:, None] == i[None, :] // 2
    low = tl.sum(tl.where(mine, lo[:, None], 0.0), axis=0)
    high = tl.sum(tl.where(mine, hi[:, None], 0.0), axis=0)
    low = tl.where(apart, low, tl.min(lo, axis=0))
    high = tl.where(apart, high, tl.max(hi, axis=0))
    part = tl.where(apart, (i % 2 + 1).to(tl.float64) / 3, (i + 1).to(tl.float64) / (THRESHOLDS + 1))
    found = low + tl.where(high > low, (high - low) * part, 0.0)
    return tl.where(i < THRESHOLDS, found.to(tl.float32).to(tl.float64), float("inf"))


@jit
def outside(hi, above_hi):
    """What lies above all brackets."""
    return tl.min(tl.where(hi == tl.max(hi, axis=0), above_hi, 1e30), axis=0)


@jit
def moved(at, above, lo, hi, limit, above_lo, above_hi):
    """Narrower brackets, and what lies above their ends: ``above`` says it of the thresholds ``at``."""
    at, above = at[None, :], above[None, :]
    within = (at > lo[:, None]) & (at < hi[:, None])
    down = within & (above < limit[:, None])
    up = within & (above >= limit[:, None])
    new_hi = tl.minimum(hi, tl.min(tl.where(down, at, float("inf")), axis=1))
    new_lo = tl.maximum(lo, tl.max(tl.where(up, at, -float("inf")), axis=1))
    at_hi = tl.max(tl.where(down & (at == new_hi[:, None]), above, 0.0), axis=1)
    at_lo = tl.max(tl.where(up & (at == new_lo[:, None]), above, 0.0), axis=1)
    above_hi = tl.where(new_hi < hi, at_hi, above_hi)
    return new_lo, new_hi, tl.where(new_lo > lo, at_lo, above_lo), above_hi


@jit
def least(ranks_lo, nucleus_lo, best, temperature, min_p, margin):
    """Smallest logits that may be drawn, of the lower ends that the searches found, and min-p. The best always stays."""
    edge = tl.arange(0, 4)
    found = tl.maximum(after(ranks_lo), after(nucleus_lo))
    filters = (temperature > 0) & (min_p > 0)
    # in fp32 as torch's operations have it
    floor = best.to(tl.float32) + tl.log(tl.where(filters, min_p, 1.0).to(tl.float64)).to(tl.float32)
    floor = tl.where(filters, floor, -float("inf")).to(tl.float64)
    return tl.minimum(tl.maximum(found, floor - (edge - 1).to(tl.float64) * margin), best).to(tl.float32)


@jit
def scalar(values, i):
    """One of eight."""
    return tl.sum(tl.where(tl.arange(0, 8) == i, values, 0.0), axis=0)
