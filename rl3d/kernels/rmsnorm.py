"""RMS normalisation (arXiv:1910.07467) that computes in fp32 and rounds where transformers rounds.

Shape legend: N rows, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl, use_triton

_PARTS = 512  # programs of the backward kernel; each adds up the weight's gradient over its rows


@jit
def _forward(x_ptr, weight_ptr, out_ptr, rstd_ptr, width, eps, BLOCK: constexpr, OVERLAP: constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = (x * rstd).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@jit
def _backward(grad_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, rows, width, per_part, BLOCK: constexpr):
    part = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    last = tl.minimum((part + 1) * per_part, rows)
    for row in range(part * per_part, last):
        x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        dweight += grad * normed
        grad = grad * weight
        dx = rstd * (grad - normed * (tl.sum(grad * normed, axis=0) / width))
        tl.store(dx_ptr + row * width + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + part * width + columns, dweight, mask=inside)


class _RMSNorm(torch.autograd.Function):
    """Saves the input, the weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if use_triton(x_NH):
            out_NH = torch.empty_like(x_NH)
            rstd_N = torch.empty(x_NH.shape[0], dtype=torch.float32, device=x_NH.device)
            if len(x_NH):
                width = x_NH.shape[1]
                _forward[(len(x_NH),)](x_NH, weight_H, out_NH, rstd_N, width, eps, BLOCK=block_of(width),
                                       **overlap(x_NH.device))  # fmt: skip
        else:
            x32_NH = x_NH.float()
            rstd_N = torch.rsqrt(x32_NH.square().mean(-1) + eps)
            out_NH = (x32_NH * rstd_N[:, None]).to(x_NH.dtype) * weight_H
        ctx.save_for_backward(x_NH, weight_H, rstd_N)
        return out_NH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_NH = grads[0].contiguous()
        x_NH, weight_H, rstd_N = ctx.saved_tensors
        if use_triton(x_NH):
            rows, width = x_NH.shape
            dx_NH = torch.empty_like(x_NH)
            parts = max(min(_PARTS, rows), 1)
            dweight_PH = torch.zeros(parts, width, dtype=torch.float32, device=x_NH.device)
            _backward[(parts,)](grad_NH, x_NH, weight_H, rstd_N, dx_NH, dweight_PH, rows, width, -(-rows // parts),
                                BLOCK=block_of(width))  # fmt: skip
            return dx_NH, dweight_PH.sum(0).to(weight_H.dtype), None
        normed_NH = x_NH.float() * rstd_N[:, None]
        dweight_H = (grad_NH.float() * normed_NH).sum(0)
        grad_NH = grad_NH.float() * weight_H.float()
        dx_NH = rstd_N[:, None] * (grad_NH - normed_NH * (grad_NH * normed_NH).mean(-1, keepdim=True))
        return dx_NH.to(x_NH.dtype), dweight_H.to(weight_H.dtype), None


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension; x [..., H] -> same shape and dtype.

    The normalised value is rounded to the dtype of ``x`` before it meets the weight, as in transformers.
    """
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight_H, eps).view(x.shape)
