"""SwiGLU (arXiv:2002.05202) on a fused [gate; up] projection, saving its input only.

Shape legend: N rows, F feed-forward width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl, triton, use_triton


@jit
def _forward(x_ptr, out_ptr, width, BLOCK: constexpr, OVERLAP: constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (activated * up).to(kind), mask=inside)


@jit
def _backward(grad_ptr, x_ptr, dx_ptr, width, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    kind = dx_ptr.dtype.element_ty
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dx_ptr + row * 2 * width + columns, dgate.to(kind), mask=inside)
    tl.store(dx_ptr + row * 2 * width + width + columns, (grad * gate * sigmoid).to(kind), mask=inside)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = block_of(width, 1024)
    return (rows, triton.cdiv(width, block)), block


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: Tensor) -> Tensor:
        ctx.save_for_backward(x_NF)
        width = x_NF.shape[1] // 2
        if not use_triton(x_NF):
            gate_NF, up_NF = x_NF.chunk(2, dim=-1)
            return F.silu(gate_NF) * up_NF
        out_NF = x_NF.new_empty(x_NF.shape[0], width)
        if len(x_NF):
            grid, block = _grid(len(x_NF), width)
            _forward[grid](x_NF, out_NF, width, BLOCK=block, **overlap(x_NF.device))
        return out_NF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x_NF,) = ctx.saved_tensors
        grad_NF = grads[0].contiguous()
        dx_NF = torch.empty_like(x_NF)
        if use_triton(x_NF):
            if len(x_NF):
                grid, block = _grid(len(x_NF), x_NF.shape[1] // 2)
                _backward[grid](grad_NF, x_NF, dx_NF, x_NF.shape[1] // 2, BLOCK=block)
            return dx_NF
        gate_NF, up_NF = (part.float() for part in x_NF.chunk(2, dim=-1))
        sigmoid_NF, grad_NF = torch.sigmoid(gate_NF), grad_NF.float()
        dgate_NF, dup_NF = dx_NF.chunk(2, dim=-1)
        dgate_NF.copy_(grad_NF * up_NF * sigmoid_NF * (1.0 + gate_NF * (1.0 - sigmoid_NF)))
        dup_NF.copy_(grad_NF * gate_NF * sigmoid_NF)
        return dx_NF


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of [..., gate F then up F] -> [..., F], same dtype; gradients are computed in fp32."""
    out = _SwiGLU.apply(x.reshape(-1, x.shape[-1]).contiguous())
    return out.view(*x.shape[:-1], x.shape[-1] // 2)
