"""Log-probabilities and entropy of chosen tokens from hidden states, with the vocabulary spread over TP ranks.

Shape legend: N tokens, H hidden, V local vocabulary rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _LogProbEntropy(torch.autograd.Function):
    """log softmax at the label, and the entropy, of logits whose columns are spread over ``group``.

    With p = softmax(z), l = log p and S = -sum p l (entropy):
    d l_y / d z_i = [i = y] - p_i and dS / d z_i = -p_i (l_i + S).
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, first_column: int, group: Any) -> tuple[Tensor, Tensor]:
        top_N = logits_NV.max(dim=-1).values
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - top_N[:, None]
        exp_NV = shifted_NV.exp()
        local_N = labels_N - first_column
        here_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
        local_N = local_N.clamp(0, logits_NV.shape[1] - 1)
        chosen_N = shifted_NV.gather(1, local_N[:, None])[:, 0].masked_fill(~here_N, 0.0)
        # pad columns hold -inf: their weight is 0, but 0 * -inf is not
        weighted_N = (exp_NV * shifted_NV.clamp(min=-1e4)).sum(-1)
        sums_3N = torch.stack([exp_NV.sum(-1), chosen_N, weighted_N])
        dist.all_reduce(sums_3N, group=group)
        total_N, chosen_N, weighted_N = sums_3N
        log_total_N = total_N.log()
        logprob_N = chosen_N - log_total_N
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(exp_NV.div_(total_N[:, None]), local_N, here_N, entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        d_logprob_N, d_entropy_N = grads
        p_NV, local_N, here_N, entropy_N = ctx.saved_tensors
        out_NV = p_NV * -d_logprob_N[:, None]
        out_NV.scatter_add_(1, local_N[:, None], (d_logprob_N * here_N)[:, None])
        if d_entropy_N.any():
            logp_NV = p_NV.clamp(min=torch.finfo(p_NV.dtype).tiny).log()
            out_NV -= d_entropy_N[:, None] * p_NV * (logp_NV + entropy_N[:, None])
        return out_NV, None, None, None


class _SumGradientOverRanks(torch.autograd.Function):
    """Identity whose gradient is summed over ``group``: every rank's columns contribute to the hidden state's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


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
    first_column = dist.get_rank(group) * weight_VH.shape[0]
    columns = torch.arange(first_column, first_column + weight_VH.shape[0], device=weight_VH.device)
    pad_V = columns >= vocab_size if first_column + weight_VH.shape[0] > vocab_size else None
    scale = 1.0 / temperature if temperature > 0 else 1.0
    hidden_NH = _SumGradientOverRanks.apply(hidden_NH, group)

    def part(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight.t()).float() * scale
        if pad_V is not None:
            logits = logits.masked_fill(pad_V, float("-inf"))
        return _LogProbEntropy.apply(logits, labels, first_column, group)

    outs = []
    for start in range(0, hidden_NH.shape[0], chunk):
        arguments = (hidden_NH[start : start + chunk], weight_VH, labels_N[start : start + chunk])
        if torch.is_grad_enabled():
            outs.append(checkpoint(part, *arguments, use_reentrant=False))
        else:
            outs.append(part(*arguments))
    if not outs:
        # keeps the graph, and with it the gradient of every parameter, alive when a row has nothing to learn from
        zero = (hidden_NH.sum() * 0.0 + weight_VH.sum() * 0.0).float().expand(0)
        return zero, zero
    return torch.cat([o[0] for o in outs]), torch.cat([o[1] for o in outs])
