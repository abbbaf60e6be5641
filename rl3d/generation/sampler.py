"""Drawing tokens from vocabulary-sharded logits.

Each rank looks only at its own slice of the vocabulary: a partial logsumexp and the two best perturbed logits cross the
tensor-parallel group, five to ten numbers a row. What a filter leaves is a matter of thresholds, which ranks agree upon
before (:mod:`rl3d.generation.filters`). All arithmetic on logits is fp32 whatever the model's dtype.

Ranks end with the same bits, because they combine the same gathered numbers; no rank broadcasts a choice.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl3d.generation.filters import MARGIN, thresholds
from rl3d.generation.noise import HASH, log_exponentials, vocabulary_keys
from rl3d.generation.transfer import to_device
from rl3d.kernels.backend import use_triton
from rl3d.kernels.sample import BLOCK, draw_partials, join_partials
from rl3d.kernels.threshold import Filters, Shard, filter_edges

_NEG_INF = float("-inf")


@dataclass
class SamplingBatch:
    """Sampling parameters of the rows of a batch, tensors [B] on the logits' device.

    ``keys`` (int64) are the sequences' noise keys; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 mean no filter; temperature
    0 is greedy. ``ranked`` and ``nucleus`` say whether any row that is not greedy has a top-k and a top-p, ``filtered``
    whether any has a filter; ``greedy`` whether all rows are greedy, ``tempered`` whether any has a temperature other than 0
    and 1: so that the common cases cost nothing.
    """

    keys: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    ranked: bool
    nucleus: bool
    filtered: bool
    greedy: bool
    tempered: bool

    @classmethod
    def build(cls, keys: list[int], temperature: list[float], top_p: list[float], top_k: list[int],
              device: torch.device, min_p: list[float] | None = None) -> "SamplingBatch":  # fmt: skip
        min_p = [0.0] * len(keys) if min_p is None else min_p
        drawn = [row for row in zip(temperature, top_p, top_k, min_p, strict=True) if row[0] > 0]
        ranked, nucleus = any(k > 0 for _, _, k, _ in drawn), any(p < 1 for _, p, _, _ in drawn)
        return cls(
            keys=to_device(keys, torch.int64, device),
            temperature=to_device(temperature, torch.float32, device),
            top_p=to_device(top_p, torch.float32, device),
            top_k=to_device(top_k, torch.int64, device),
            min_p=to_device(min_p, torch.float32, device),
            ranked=ranked,
            nucleus=nucleus,
            filtered=ranked or nucleus or any(m > 0 for _, _, _, m in drawn),
            greedy=not drawn,
            tempered=any(t not in (0, 1) for t in temperature),
        )


@dataclass
class Draw:
    """Outcome of one step, all [B]: token ids (int64), margin below :data:`MARGIN` (bool, or 0 and 1), log probabilities.

    ``logprobs``, ``sampled`` and ``plain`` are a :class:`rl3d.generation.engine.Result`'s ``logprobs``,
    ``sampled_logprobs`` and ``plain_logprobs``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    close: torch.Tensor
    sampled: torch.Tensor
    plain: torch.Tensor
    together: torch.Tensor | None = None  # what packed() gives, where a kernel has written it already

    def packed(self) -> torch.Tensor:
        """Tokens, close, logprobs, sampled and plain as fp64 [5, B]."""
        if self.together is not None:
            return self.together
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
        fused: draw in kernels where Triton runs, which nothing makes wait for the host; off, torch's operations give the
            same tokens.
    """

    def __init__(self, vocab_size: int, padded_vocab: int, tp_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.fused = tp_group, True
        self.tp = 1 if tp_group is None else tp_group.size()
        self.vocab_size = vocab_size
        rows = padded_vocab // self.tp
        self.start = 0 if tp_group is None else rows * tp_group.rank()
        self.valid = max(0, min(rows, vocab_size - self.start))
        self.shard_keys_V = vocabulary_keys(self.start, self.start + self.valid, device)
        self.width = min(rows, vocab_size)  # of the widest shard: the first one

    def draw(self, logits_BV: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor,
             out: tuple[torch.Tensor, torch.Tensor] | None = None) -> Draw:  # fmt: skip
        """Draw one token a row.

        ``logits_BV``: this rank's slice of the padded vocabulary, any float dtype. ``positions_B``: index of the new
        token in its sequence (prompt included), so that a sequence that is cut off and continued draws the same noise.

        ``logprobs`` of the result are those of the drawn tokens under softmax(logits / temperature) over the true
        vocabulary *before* the filters (temperature 1 where greedy): the number the trainer recomputes.

        ``out``: int64 [B] and fp64 [5, B] that shall hold the tokens and what :meth:`Draw.packed` gives.
        """
        if self.fused and use_triton(logits_BV):
            return self._draw_fused(logits_BV, batch, positions_B, out)
        if out is not None:
            draw = self.draw(logits_BV, batch, positions_B)
            out[0].copy_(draw.tokens)
            out[1].copy_(draw.packed())
            return draw
        local = logits_BV[:, : self.valid]
        scaled = plain = local.float()
        if not batch.greedy:
            scaled = scaled / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        perturbed = scaled if batch.greedy else self._perturb(scaled, batch, positions_B)
        tight = None
        if batch.filtered:
            tight, exact, loose = thresholds(
                scaled, batch.temperature, batch.top_p, batch.top_k, batch.min_p, self._gather, self.width, self.vocab_size
            )
            widest = perturbed.masked_fill_(scaled < loose, _NEG_INF)
            perturbed = widest.masked_fill(scaled < exact, _NEG_INF)
        parts = _partials(scaled, perturbed, plain if batch.tempered else None, self.start)
        if batch.filtered:
            parts = torch.cat([parts, _filtered_partials(scaled, perturbed, widest, self.start)], 1)
        return _combine(self._gather(parts[:, None]), batch, tight)  # [B, tp, n], ranks in rising order of vocabulary

    def _draw_fused(self, logits_BV: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor,
                    out: tuple[torch.Tensor, torch.Tensor] | None) -> Draw:  # fmt: skip
        edges = None
        if batch.filtered:
            shard = Shard(logits_BV, self.valid, self.vocab_size, batch.temperature, self._gather if self.tp > 1 else None,
                          batch.tempered)  # fmt: skip
            edges = filter_edges(shard, Filters(batch.top_k, batch.top_p, batch.min_p, MARGIN, batch.ranked, batch.nucleus))
        return _joined(self._gather(self._fused_partials(logits_BV, batch, positions_B, edges)), batch, out, edges)

    def _fused_partials(self, logits_BV: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor,
                        edges: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """Partials of each block of the shard, fp64 [B, blocks, 5 to 10], as many blocks on every rank."""
        blocks = -(-logits_BV.shape[1] // BLOCK)
        parts = draw_partials(logits_BV, self.valid, self.start, batch.keys, positions_B, self.shard_keys_V,
                              batch.temperature, HASH, greedy=batch.greedy, plain=batch.tempered,
                              edges_B3=edges)  # fmt: skip
        missing = blocks - parts.shape[1]  # of padding only
        if missing:
            nothing = torch.full((len(parts), missing, parts.shape[2]), _NEG_INF, dtype=parts.dtype, device=parts.device)
            nothing[:, :, 2] = self.start
            if edges is not None:
                nothing[:, :, -1] = self.start
            parts = torch.cat([parts, nothing], 1)
        return parts

    def _perturb(self, scaled: torch.Tensor, batch: SamplingBatch, positions_B: torch.Tensor) -> torch.Tensor:
        noise = log_exponentials(batch.keys, positions_B, self.shard_keys_V)
        noise.masked_fill_((batch.temperature <= 0)[:, None], 0.0)
        return torch.sub(scaled, noise, out=noise)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate [B, n, ...] over the group along dimension 1."""
        if self.tp == 1:
            return x
        x = x.contiguous()
        every = x.new_empty(self.tp * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(every, x, group=self.group)
        return every.view(self.tp, *x.shape).transpose(0, 1).flatten(1, 2)


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


def _filtered_partials(scaled: torch.Tensor, perturbed: torch.Tensor, widest: torch.Tensor, start: int) -> torch.Tensor:
    """Per row, fp64 [B, 3]: logsumexp of what the filter left, the best perturbed logit that a wider one leaves, its id."""
    if scaled.shape[1] == 0:
        nothing = torch.full((scaled.shape[0], 3), _NEG_INF, dtype=torch.float64, device=scaled.device)
        nothing[:, 2] = start
        return nothing
    left = scaled.masked_fill(perturbed == _NEG_INF, _NEG_INF).logsumexp(-1)
    best, index = widest.max(-1)
    return torch.stack([left.double(), best.double(), (index + start).double()], 1)


def _joined(parts: torch.Tensor, batch: SamplingBatch, out: tuple[torch.Tensor, torch.Tensor] | None = None,
            edges: torch.Tensor | None = None) -> Draw:  # fmt: skip
    """:func:`_combine` as one kernel. Everything but the tokens is a view of one tensor."""
    if out is None:
        out = (torch.empty(len(parts), dtype=torch.int64, device=parts.device),
               torch.empty(5, len(parts), dtype=torch.float64, device=parts.device))  # fmt: skip
    tokens, packed = out
    join_partials(parts, batch.temperature, MARGIN, tokens, packed, edges)
    return Draw(tokens, packed[2], packed[1], packed[3], packed[4], packed)


def _combine(parts: torch.Tensor, batch: SamplingBatch, tight: torch.Tensor | None = None) -> Draw:
    """Join the partials of all shards, fp64 [B, shards, n]; a filter's (:func:`_filtered_partials`) come last.

    A filtered draw is close, too, when moving the filter's edge by the margin changes it: outwards another would be drawn,
    inwards (``tight`` [B, 1]) this one could not.
    """
    lse, best, ids, second, logit = parts[..., :5].unbind(-1)
    winner = best.argmax(-1, keepdim=True)  # shards rise with the vocabulary: ties go to the lowest id
    top = best.gather(1, winner)
    rival = torch.maximum(best.scatter(1, winner, _NEG_INF).amax(-1), second.gather(1, winner)[:, 0])
    logit, token = logit.gather(1, winner)[:, 0], ids.gather(1, winner)[:, 0]
    close = top[:, 0] - rival < MARGIN
    logprob = plain = sampled = (logit - lse.logsumexp(-1)).float()
    if batch.tempered:
        plain = (parts[..., 6].gather(1, winner)[:, 0] - parts[..., 5].logsumexp(-1)).float()
    if tight is not None:
        left, wide, wide_ids = parts[..., -3:].unbind(-1)
        sampled = (logit - left.logsumexp(-1)).float()
        widest = wide_ids.gather(1, wide.argmax(-1, keepdim=True))[:, 0]
        close = close | (widest != token) | (logit < tight[:, 0])
    sampled = torch.where(batch.temperature > 0, sampled, 0.0)
    return Draw(token.long(), logprob, close, sampled, plain)
