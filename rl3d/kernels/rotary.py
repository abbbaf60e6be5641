"""Rotary position embedding (arXiv:2104.09864), halves rotated against each other as in transformers.

Shape legend: T tokens, H heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from rl3d.kernels.backend import block_of, constexpr, jit, tl, use_triton


@jit
def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, heads, half, token_stride, head_stride, sign, HEADS: constexpr,
            HALF: constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    cos = tl.load(cos_ptr + token * half + column, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + token * half + column, mask=column < half, other=0.0) * sign
    at = x_ptr + token * token_stride + head * head_stride + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    to = out_ptr + (token * heads + head) * (2 * half) + column
    tl.store(to, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to + half, (second * cos + first * sin).to(kind), mask=inside)


def _apply(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, sign: float) -> Tensor:
    half = cos_TD.shape[1]
    if not use_triton(x_THD) or not len(x_THD):
        first, second = x_THD.float().split(half, dim=-1)
        cos, sin = cos_TD[:, None], sin_TD[:, None] * sign
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THD.dtype)
    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    tokens, heads, _ = x_THD.shape
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    block = min(block_of(heads), 16)
    _rotate[(tokens, -(-heads // block))](x_THD, cos_TD, sin_TD, out_THD, heads, half, x_THD.stride(0), x_THD.stride(1),
                                          sign, HEADS=block, HALF=block_of(half))  # fmt: skip
    return out_THD


class _Rotary(torch.autograd.Function):
    """A rotation: backward turns the other way. Nothing but the shared tables is saved."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _apply(x_THD, cos_TD, sin_TD, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _apply(grads[0], cos_TD, sin_TD, -1.0), None, None


def rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """``x`` [T, H, D] rotated by each token's angles; contiguous, same dtype.

    Args:
        x_THD: queries or keys, any strides.
        cos_TD, sin_TD: fp32 [T, D / 2], contiguous; scaled already where the variant of RoPE scales them.
    """
    return _Rotary.apply(x_THD, cos_TD, sin_TD)
