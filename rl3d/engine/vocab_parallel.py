"""Log-probabilities and entropy of chosen tokens from hidden states, with the vocabulary spread over TP ranks.

Shape legend: N tokens, H hidden, V local vocabulary rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.kernels import fp32_logits, logprob_gradient, logprob_statistics


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary, and how logits are scaled."""

    first: int  # global id of the first column
    valid: int  # columns that are no padding
    scale: float
    group: Any
    chunk: int

    def labels(self, labels_N: Tensor) -> Tensor:
        """Columns of this shard; what lies outside it stays outside ``[0, valid)``."""
        return labels_N - self.first


def _combine(statistics_N4: Tensor, here_N: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, log-sum-exp), each [N], from every rank's (max, sum, weighted sum, z of the label)."""
    local_top_N, sum_N, weighted_N, chosen_N = statistics_N4.unbind(1)
    top_N = local_top_N.clone()
    dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
    gap_N = local_top_N - top_N
    shrink_N = gap_N.exp()
    sums_3N = torch.stack([
        shrink_N * sum_N, shrink_N * (weighted_N + gap_N * sum_N), torch.where(here_N, chosen_N - top_N, 0.0),
    ])  # fmt: skip
    dist.all_reduce(sums_3N, group=group)
    total_N, weighted_N, chosen_N = sums_3N
    log_total_N = total_N.log()
    return chosen_N - log_total_N, log_total_N - weighted_N / total_N, log_total_N + top_N


class _TokenLogProbs(torch.autograd.Function):
    """Logits exist for ``chunk`` tokens at a time; backward computes them again."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
        columns_N = shard.labels(labels_N)
        statistics = [
            logprob_statistics(fp32_logits(hidden, weight_VH), columns, shard.valid, shard.scale)
            for hidden, columns in zip(hidden_NH.split(shard.chunk), columns_N.split(shard.chunk))
        ]
        here_N = (columns_N >= 0) & (columns_N < shard.valid)
        logprobs_N, entropy_N, lse_N = _combine(torch.cat(statistics), here_N, shard.group)
        ctx.shard = shard
        ctx.save_for_backward(hidden_NH, weight_VH, columns_N, lse_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        shard: _Shard = ctx.shard
        hidden_NH, weight_VH, *per_token = ctx.saved_tensors
        d_hidden_NH = torch.empty_like(hidden_NH)
        d_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        parts = zip(*(t.split(shard.chunk) for t in (hidden_NH, d_hidden_NH, *per_token, *grads)))
        for hidden, d_hidden, columns, lse, entropy, d_logprob, d_entropy in parts:
            d_logits = logprob_gradient(fp32_logits(hidden, weight_VH), columns, lse, entropy, d_logprob, d_entropy,
                                        shard.valid, shard.scale, hidden.dtype)  # fmt: skip
            torch.mm(d_logits, weight_VH, out=d_hidden)
            if d_weight_VH is not None:
                d_weight_VH.addmm_(d_logits.t(), hidden)
        # every rank's columns contribute to the gradient of the hidden state, which all of them hold
        dist.all_reduce(d_hidden_NH, group=shard.group)
        return d_hidden_NH, d_weight_VH, None, None


def token_logprobs(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, *, vocab_size: int, temperature: float,
                   group: Any, chunk: int = 1024) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fp32 log-probability of each label, and the entropy, under softmax(logits / temperature).

    Logits exist in fp32 for ``chunk`` tokens at a time, forward and backward: backward recomputes them.

    Args:
        hidden_NH: hidden states after the final norm, equal on all ranks of ``group``.
        weight_VH: this rank's rows of the output projection; rows beyond ``vocab_size`` (global) pad it.
        labels_N: int64 token ids.
        temperature: what the logits are divided by; greedy rollouts (0) count as 1, as in generation.

    Returns:
        ``(logprobs_N, entropy_N)``, fp32, equal on all ranks of ``group``.
    """
    if not len(labels_N):
        # keeps the graph, and with it the gradient of every parameter, alive when a row has nothing to learn from
        zero = (hidden_NH.sum() * 0.0 + weight_VH.sum() * 0.0).float().expand(0)
        return zero, zero
    first = dist.get_rank(group) * weight_VH.shape[0]
    valid = min(max(vocab_size - first, 0), weight_VH.shape[0])
    shard = _Shard(first, valid, 1.0 / temperature if temperature > 0 else 1.0, group, chunk)
    return _TokenLogProbs.apply(hidden_NH.contiguous(), weight_VH, labels_N, shard)
