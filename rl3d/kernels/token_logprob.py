"""Log softmax at a label, and the entropy, in one pass over a shard of the vocabulary; and their gradient in another.

With z = logits * scale, m = max z, S = sum exp(z - m) and W = sum exp(z - m) (z - m), over the columns of one shard, the
statistics of several shards combine without another look at the logits.

Shape legend: N tokens, V vocabulary columns of this shard.
"""

import torch
from torch import Tensor

from rl3d.kernels.backend import block_of, constexpr, jit, tl, use_triton

_LOWEST = -1e30  # stands for the logit of a pad column: 0 * -inf would be NaN


@jit
def _statistics(logits_ptr, labels_ptr, out_ptr, width, valid, scale, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total, weighted = -1e30, 0.0, 0.0
    label = tl.load(labels_ptr + row)
    chosen = 0.0
    for start in range(0, valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < valid
        z = tl.load(logits_ptr + row * width + columns, mask=inside, other=-1e30).to(tl.float32)
        z = tl.where(inside, z * scale, -1e30)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shrink = tl.exp(top - new_top)
        shifted = z - new_top
        weight = tl.where(inside, tl.exp(shifted), 0.0)
        weighted = shrink * (weighted + (top - new_top) * total) + tl.sum(weight * shifted, axis=0)
        total = shrink * total + tl.sum(weight, axis=0)
        chosen += tl.sum(tl.where(inside & (columns == label), z, 0.0), axis=0)
        top = new_top
    tl.store(out_ptr + row * 4, top)
    tl.store(out_ptr + row * 4 + 1, total)
    tl.store(out_ptr + row * 4 + 2, weighted)
    tl.store(out_ptr + row * 4 + 3, chosen)


@jit
def _gradient(logits_ptr, labels_ptr, lse_ptr, entropy_ptr, dlogprob_ptr, dentropy_ptr, out_ptr, width, valid, scale,
              BLOCK: constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label, lse, entropy = tl.load(labels_ptr + row), tl.load(lse_ptr + row), tl.load(entropy_ptr + row)
    dlogprob, dentropy = tl.load(dlogprob_ptr + row), tl.load(dentropy_ptr + row)
    inside = columns < valid
    logprob = tl.load(logits_ptr + row * width + columns, mask=inside, other=-1e30).to(tl.float32) * scale - lse
    p = tl.where(inside, tl.exp(logprob), 0.0)
    out = -p * (dlogprob + dentropy * (logprob + entropy)) + tl.where(columns == label, dlogprob, 0.0)
    out = tl.where(inside, out * scale, 0.0)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=columns < width)


def logprob_statistics(logits_NV: Tensor, labels_N: Tensor, valid: int, scale: float) -> Tensor:
    """[N, 4] fp32: m, S, W and z at the label (0 where the label is not in this shard).

    Args:
        logits_NV: this shard's logits, contiguous.
        labels_N: int64 column inside this shard; anything outside ``[0, valid)`` is another shard's.
        valid: columns that are real; those behind pad the vocabulary.
        scale: what logits are multiplied by (1 / temperature).
    """
    rows, width = logits_NV.shape
    if use_triton(logits_NV):
        out_N4 = torch.empty(rows, 4, dtype=torch.float32, device=logits_NV.device)
        if rows:
            _statistics[(rows,)](logits_NV, labels_N, out_N4, width, valid, scale, BLOCK=block_of(width, 4096))
        return out_N4
    z_NV = logits_NV[:, :valid].float() * scale
    top_N = z_NV.amax(-1) if valid else z_NV.new_full((rows,), _LOWEST)
    shifted_NV = z_NV - top_N[:, None]
    weight_NV = shifted_NV.exp()
    here_N = (labels_N >= 0) & (labels_N < valid)
    chosen_N = z_NV.gather(1, labels_N.clamp(0, max(valid - 1, 0))[:, None])[:, 0] if valid else torch.zeros_like(top_N)
    parts = (top_N, weight_NV.sum(-1), (weight_NV * shifted_NV).sum(-1), chosen_N.masked_fill(~here_N, 0.0))
    return torch.stack(parts, dim=1)


def logprob_gradient(logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, entropy_N: Tensor, d_logprob_N: Tensor,
                     d_entropy_N: Tensor, valid: int, scale: float, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Gradient [N, V] in ``dtype`` with respect to the unscaled logits.

    With p = softmax(z) over all shards, l = log p and H the entropy:
    d l_y / d z_i = [i = y] - p_i and d H / d z_i = -p_i (l_i + H).
    """
    rows, width = logits_NV.shape
    out_NV = torch.empty(rows, width, dtype=dtype, device=logits_NV.device)
    if use_triton(logits_NV):
        if rows:
            block = block_of(width, 4096)
            per_row = (lse_N, entropy_N, d_logprob_N, d_entropy_N)
            _gradient[(rows, -(-width // block))](logits_NV, labels_N, *(t.contiguous() for t in per_row), out_NV, width,
                                                  valid, scale, BLOCK=block)  # fmt: skip
        return out_NV
    logprob_NV = logits_NV[:, :valid].float() * scale - lse_N[:, None]
    grad_NV = -logprob_NV.exp() * (d_logprob_N[:, None] + d_entropy_N[:, None] * (logprob_NV + entropy_N[:, None]))
    here_N = (labels_N >= 0) & (labels_N < valid)
    if valid:
        grad_NV.scatter_add_(1, labels_N.clamp(0, valid - 1)[:, None], (d_logprob_N * here_N)[:, None])
    out_NV[:, :valid] = grad_NV * scale
    out_NV[:, valid:] = 0
    return out_NV
