"""Which logits top-k, top-p and min-p leave, from a vocabulary that is spread over ranks.

A filter is a threshold on the logits of its row, and every rank can mask its own shard with it. Nearly always the
largest entries of each shard decide it: the best of the whole vocabulary are among them, and they, not the shards, cross
the group. A nucleus that is wider than that is found by bisection: 32 halvings of the range of fp32, for each of which
ranks exchange how much probability lies above.
"""

from collections.abc import Callable

import torch

MARGIN = 1e-5
"""Draws that a last bit may flip: perturbed logits closer than this, or a nucleus whose edge is."""

_HEAD = 1024  # a nucleus nearly always lies within this many entries
_NEG_INF = float("-inf")

Gather = Callable[[torch.Tensor], torch.Tensor]
Thresholds = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def thresholds(scaled: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor,
               min_p: torch.Tensor, gather: Gather, width: int, size: int) -> Thresholds:  # fmt: skip
    """Smallest logit that may be drawn, [B, 1] each, for filters tighter by :data:`MARGIN`, as they are, looser by it.

    Top-k, then top-p on what top-k left, renormalised, then min-p; ties with the last stay. Rows of temperature 0 are
    not filtered.

    Args:
        scaled: this rank's logits over the temperature, fp32 [B, n]; n may be 0.
        temperature, top_p, top_k, min_p: [B], as in :class:`rl3d.generation.sampler.SamplingBatch`.
        gather: joins [B, m] tensors of all ranks along dimension 1.
        width: most columns of any rank; ``size``: of the vocabulary.
    """
    off = temperature <= 0
    top_k = torch.where((top_k <= 0) | off, size, top_k.clamp(max=size))[:, None]
    top_p = torch.where(off, 1.0, top_p)[:, None].double()
    unfiltered = (top_k >= size) & (top_p >= 1.0)
    whole = gather(scaled.logsumexp(-1, keepdim=True)).logsumexp(-1, keepdim=True)
    alone = width >= size
    head = min(_HEAD, size)
    while True:
        ranked = _ranked(scaled, gather, min(head, width), head)
        inside = torch.arange(head, device=scaled.device)[None] < top_k
        mass = (ranked - whole).double().exp().masked_fill(~inside, 0.0)
        before = mass.cumsum(-1) - mass  # probability of everything ranked higher
        total = torch.where(top_k < size, mass.sum(-1, keepdim=True), 1.0)  # top-k renormalises
        enough = (top_k >= size) & (before[:, -1:] >= top_p + MARGIN)
        covered = unfiltered | (top_k <= head) | enough
        if head == size or bool(covered.all()):
            wide = None
            break
        if not alone:
            wide = _bisect(scaled, whole, top_k, top_p, gather, size)
            break
        head = size
    share = before / total
    best = ranked[:, :1]

    def limit(step: int) -> torch.Tensor:
        keep = inside & ((share < top_p + step * MARGIN) | (top_p >= 1.0))
        keep[:, 0] = True  # the most probable entry is never excluded
        found = ranked.gather(1, keep.sum(-1, keepdim=True) - 1)
        if wide is not None:
            found = torch.where(covered, found, torch.minimum(wide[step + 1], best))
        return found.masked_fill(unfiltered, _NEG_INF)

    floor = torch.where(off[:, None], _NEG_INF, best + min_p[:, None].log())
    tight = torch.minimum(floor + MARGIN, best)
    return torch.maximum(limit(-1), tight), torch.maximum(limit(0), floor), torch.maximum(limit(1), floor - MARGIN)


def _ranked(scaled: torch.Tensor, gather: Gather, each: int, head: int) -> torch.Tensor:
    """The ``head`` largest logits of the whole vocabulary, falling, [B, head]; ``each`` of them from every rank."""
    mine = scaled.topk(min(each, scaled.shape[1]), dim=-1).values
    missing = each - mine.shape[1]  # of a shard that is padding in part
    if missing:
        mine = torch.cat([mine, mine.new_full((len(mine), missing), _NEG_INF)], 1)
    every = gather(mine)
    return every if every.shape[1] == each == head else every.topk(head, dim=-1).values


def _bisect(scaled: torch.Tensor, whole: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, gather: Gather,
            size: int) -> Thresholds:  # fmt: skip
    """:func:`thresholds` of top-k and top-p by bisection, without sorting."""
    keys = _ordered(scaled + 0.0)  # -0.0 is 0.0
    probability = (scaled - whole).double().exp()

    def above(weights: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Sum of weights [B, n] above each of the keys [B, m], over all ranks; in the same order on every rank."""
        parts = [(weights * (keys > key[:, i : i + 1])).sum(-1) for i in range(key.shape[1])]
        mine = torch.stack(parts, 1)[:, None]
        return gather(mine).sum(1)

    def smallest(weights: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        """The smallest key [B, m] above which there is less than ``limit`` [B, m]: always that of an entry."""
        low = torch.full(limit.shape, -(1 << 31), dtype=torch.int64, device=limit.device)
        high = torch.full_like(low, (1 << 31) - 1)
        for _ in range(32):
            middle = (low + high) >> 1
            few = above(weights, middle) < limit
            high, low = torch.where(few, middle, high), torch.where(few, low, middle + 1)
        return high

    ones = torch.ones_like(probability)
    edge = smallest(ones, top_k.double())
    value = _floats(edge)
    counted, mass = above(ones, edge), above(probability, edge)
    total = mass + (top_k.double() - counted) * (value - whole).double().exp()
    total = torch.where(top_k < size, total, 1.0)
    limits = torch.cat([(top_p + step * MARGIN) * total for step in (-1, 0, 1)], 1)
    limits = torch.where(top_p >= 1.0, float("inf"), limits)
    found = torch.maximum(_floats(smallest(probability, limits)), value)
    return found[:, 0:1], found[:, 1:2], found[:, 2:3]


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 that order as the fp32 values do."""
    bits = x.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _floats(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_ordered`; keys below all values are -inf."""
    bits = keys.to(torch.int32)
    out = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(out.isnan(), _NEG_INF, out)
