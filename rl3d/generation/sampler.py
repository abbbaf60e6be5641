"""Drawing tokens from vocabulary-sharded logits.

Without filters each rank looks only at its own slice of the vocabulary: a partial logsumexp and the two best
perturbed logits cross the tensor-parallel group, five to seven numbers a row. With a filter the whole row decides who may be
drawn, so the logits are gathered first. All arithmetic on logits is fp32 whatever the model's dtype.

Ranks end with the same bits, because they combine the same gathered numbers; no rank broadcasts a choice.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl3d.generation.noise import HASH, log_exponentials, vocabulary_keys
from rl3d.kernels.backend import use_triton
from rl3d.kernels.sample import BLOCK, draw_partials

MARGIN = 1e-5
"""Draws whose best and second-best perturbed logits are closer than this may flip with the last bit of a logit."""

_HEAD = 1024  # a nucleus nearly always lies within this many entries: sort those first, everything only if it does not
_NEG_INF = float("-inf")


@dataclass
class SamplingBatch:
    """Sampling parameters of the rows of a batch, tensors [B] on the logits' device.

    ``keys`` (int64) are the sequences' noise keys; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 mean no filter; temperature
    0 is greedy. ``filtered`` and ``greedy`` say whether any row filters and whether all rows are greedy, ``tempered``
    whether any has a temperature other than 0 and 1, so that the common cases cost nothing.
    """

    keys: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    filtered: bool
    greedy: bool
    tempered: bool

    @classmethod
    def build(cls, keys: list[int], temperature: list[float], top_p: list[float], top_k: list[int],
              device: torch.device, min_p: list[float] | None = None) -> "SamplingBatch":  # fmt: skip
        min_p = [0.0] * len(keys) if min_p is None else min_p
        rows = zip(temperature, top_p, top_k, min_p, strict=True)
        filtered = any(t > 0 and (p < 1 or k > 0 or m > 0) for t, p, k, m in rows)
        return cls(
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            filtered=filtered,
            greedy=not any(t > 0 for t in temperature),
            tempered=any(t not in (0, 1) for t in temperature),
        )


@dataclass
class Draw:
    """Outcome of one step, all [B]: token ids (int64), margin below :data:`MARGIN` (bool), log probabilities (fp32).

    ``logprobs``, ``sampled`` and ``plain`` are a :class:`rl3d.generation.engine.Result`'s ``logprobs``,
    ``sampled_logprobs`` and ``plain_logprobs``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    close: torch.Tensor
    sampled: torch.Tensor
    plain: torch.Tensor

    def packed(self) -> torch.Tensor:
        """Tokens, close, logprobs, sampled and plain as fp64 [5, B]."""
        return torch.stack([x.double() for x in (self.tokens, self.close, self.logprobs, self.sampled, self.plain)])

    def to_host(self) -> list[tuple[int, bool, float, float, float]]:
        """Rows of (token, close, logprob, sampled, plain), in one transfer."""
        return [(int(t), bool(c), lp, s, p) for t, c, lp, s, p in zip(*self.packed().tolist(), strict=True)]


class Sampler:
    """Gumbel-max over a vocabulary shard.

    Args:
        vocab_size: true vocabulary size; rows from there on pad the embedding and can neither be drawn nor count in
            the logsumexp.
        padded_vocab: rows of the embedding over all ranks, a multiple of the group size.
        tp_group: the ranks that share the vocabulary, or ``None`` for one rank.

    Attributes:
        fused: draw without filters in one pass where Triton runs; off, torch's operations give the same tokens.
    """

    def __init__(self, vocab_size: int, padded_vocab: int, tp_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.fused = tp_group, True
        self.tp = 1 if tp_group is None else tp_group.size()
        self.vocab_size = vocab_size
        rows = padded_vocab // self.tp
        self.start = 0 if tp_group is None else rows * tp_group.rank()
        self.valid = max(0, min(rows, vocab_size - self.start))
        self.shard_keys_V = vocabulary_keys(self.start, self.start + self.valid, device)
        self.all_keys_V = self.shard_keys_V if self.tp == 1 else vocabulary_keys(0, vocab_size, device)

    def draw(self, logits_BV: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor) -> Draw:
        """Draw one token a row.

        ``logits_BV``: this rank's slice of the padded vocabulary, any float dtype. ``positions_B``: index of the new
        token in its sequence (prompt included), so that a sequence that is cut off and continued draws the same noise.

        ``logprobs`` of the result are those of the drawn tokens under softmax(logits / temperature) over the true
        vocabulary *before* the filters (temperature 1 where greedy): the number the trainer recomputes.
        """
        if self.fused and not batch.filtered and use_triton(logits_BV):
            return _combine(self._gather(self._fused_partials(logits_BV, batch, positions_B)), batch)
        if batch.filtered:
            local, start, keys_V = self._gather(logits_BV)[:, : self.vocab_size], 0, self.all_keys_V
        else:
            local, start, keys_V = logits_BV[:, : self.valid], self.start, self.shard_keys_V
        scaled = plain = local.float()
        if not batch.greedy:
            scaled = scaled / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        perturbed = scaled if batch.greedy else self._perturb(scaled, batch, positions_B, keys_V)
        close = None
        if batch.filtered:
            perturbed, close = _filter(scaled, perturbed, batch)
        parts = _partials(scaled, perturbed, plain if batch.tempered else None, start)
        if batch.filtered:
            left = scaled.masked_fill(perturbed == _NEG_INF, _NEG_INF).logsumexp(-1, keepdim=True)
            parts = torch.cat([parts, left.double()], 1)
        if self.tp > 1 and not batch.filtered:
            parts = self._gather(parts[:, None])  # [B, tp, n], ranks in rising order of vocabulary
        else:
            parts = parts[:, None]
        draw = _combine(parts, batch)
        if close is not None:
            draw.close |= close
        return draw

    def _fused_partials(self, logits_BV: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor) -> torch.Tensor:
        """:func:`_partials` of each block of the shard, fp64 [B, blocks, 5 or 7], as many blocks on every rank."""
        blocks = -(-logits_BV.shape[1] // BLOCK)
        parts = draw_partials(logits_BV, self.valid, self.start, batch.keys, positions_B, self.shard_keys_V,
                              batch.temperature, HASH, greedy=batch.greedy, plain=batch.tempered)  # fmt: skip
        missing = blocks - parts.shape[1]  # of padding only
        if missing:
            nothing = torch.full((len(parts), missing, parts.shape[2]), _NEG_INF, dtype=parts.dtype, device=parts.device)
            nothing[:, :, 2] = self.start
            parts = torch.cat([parts, nothing], 1)
        return parts

    def _perturb(
        self, scaled: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor, keys_V: torch.Tensor
    ) -> torch.Tensor:
        noise = log_exponentials(batch.keys, positions_B, keys_V)
        noise.masked_fill_((batch.temperature <= 0)[:, None], 0.0)
        return torch.sub(scaled, noise, out=noise)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate [B, n, ...] over the group along dimension 1."""
        if self.tp == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.tp)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, 1)


def _partials(scaled: torch.Tensor, perturbed: torch.Tensor, plain: torch.Tensor | None, start: int) -> torch.Tensor:
    """Per row, fp64 [B, 5 or 7] so that a vocabulary id survives the trip: logsumexp, best perturbed logit, its global
    id, second best, the scaled logit of the best; with ``plain`` also logsumexp and best's logit at temperature 1.
    """
    if scaled.shape[1] == 0:  # a shard of padding only
        columns = 5 if plain is None else 7
        nothing = torch.full((scaled.shape[0], columns), _NEG_INF, dtype=torch.float64, device=scaled.device)
        nothing[:, 2] = start
        return nothing
    index = perturbed.argmax(-1, keepdim=True)  # the first of equals: lowest id
    best = perturbed.gather(1, index)
    second = perturbed.scatter(1, index, _NEG_INF).amax(-1, keepdim=True)
    parts = [scaled.logsumexp(-1, keepdim=True), best, index + start, second, scaled.gather(1, index)]
    if plain is not None:
        parts += [plain.logsumexp(-1, keepdim=True), plain.gather(1, index)]
    return torch.cat([x.double() for x in parts], 1)


def _combine(parts: torch.Tensor, batch: SamplingBatch) -> Draw:
    """Join the partials of all shards, fp64 [B, shards, n]; a filter's logsumexp over what it left comes last."""
    lse, best, ids, second, logit = parts[..., :5].unbind(-1)
    winner = best.argmax(-1, keepdim=True)  # shards rise with the vocabulary: ties go to the lowest id
    top = best.gather(1, winner)
    rival = torch.maximum(best.scatter(1, winner, _NEG_INF).amax(-1), second.gather(1, winner)[:, 0])
    logit = logit.gather(1, winner)[:, 0]
    logprob = plain = sampled = (logit - lse.logsumexp(-1)).float()
    if batch.tempered:
        plain = (parts[..., 6].gather(1, winner)[:, 0] - parts[..., 5].logsumexp(-1)).float()
    if batch.filtered:
        sampled = (logit - parts[:, 0, -1]).float()
    sampled = torch.where(batch.temperature > 0, sampled, 0.0)
    return Draw(ids.gather(1, winner)[:, 0].long(), logprob, top[:, 0] - rival < MARGIN, sampled, plain)


def _filter(scaled: torch.Tensor, perturbed: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask what top-k, then top-p (on what top-k left, renormalised), then min-p exclude; ties with the last stay.

    Returns the masked perturbed logits and, per row, whether moving the nucleus by :data:`MARGIN` changes the draw.
    """
    tight, exact, loose = _thresholds(scaled, batch)
    masked = perturbed.masked_fill(scaled < loose, _NEG_INF)
    widest = masked.argmax(-1, keepdim=True)
    masked.masked_fill_(scaled < exact, _NEG_INF)
    drawn = masked.argmax(-1, keepdim=True)
    close = (widest != drawn) | (scaled.gather(1, drawn) < tight)
    return masked, close[:, 0]


def _thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Smallest logit that may be drawn, [B, 1] each, for filters tighter by the margin, as they are, looser by it."""
    size = scaled.shape[1]
    off = batch.temperature <= 0
    top_k = torch.where((batch.top_k <= 0) | off, size, batch.top_k.clamp(max=size))[:, None]
    top_p = torch.where(off, 1.0, batch.top_p)[:, None].double()
    unfiltered = (top_k >= size) & (top_p >= 1.0)
    whole = scaled.logsumexp(-1, keepdim=True)
    head = min(_HEAD, size)
    while True:
        ranked = scaled.topk(head, dim=-1).values
        inside = torch.arange(head, device=scaled.device)[None] < top_k
        mass = (ranked - whole).double().exp().masked_fill(~inside, 0.0)
        before = mass.cumsum(-1) - mass  # probability of everything ranked higher
        # top-k renormalises; where top-k does not end within the head the total is 1
        total = torch.where(top_k <= head, mass.sum(-1, keepdim=True), 1.0)
        last = before[:, -1:] / total
        covered = unfiltered | (top_k <= head) | (last >= top_p + MARGIN)
        if head == size or bool(covered.all()):
            break
        head = size
    share = before / total

    def threshold(limit: torch.Tensor) -> torch.Tensor:
        keep = inside & ((share < limit) | (top_p >= 1.0))
        keep[:, 0] = True  # the most probable entry is never excluded
        return ranked.gather(1, keep.sum(-1, keepdim=True) - 1).masked_fill(unfiltered, _NEG_INF)

    best = ranked[:, :1]
    floor = torch.where(off[:, None], _NEG_INF, best + batch.min_p[:, None].log())
    tight = torch.minimum(floor + MARGIN, best)
    return (
        torch.maximum(threshold(top_p - MARGIN), tight),
        torch.maximum(threshold(top_p), floor),
        torch.maximum(threshold(top_p + MARGIN), floor - MARGIN),
    )
