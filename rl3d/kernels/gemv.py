"""Products of one row with a matrix: a decode step of a single sequence, whose time is that of reading the weights.

What comes before and after rides along: the RMS norm of the row (each program needs the whole row anyway), SwiGLU, the
residual addition. Values are rounded where the separate operations round them.

Shape legend: N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl, use_triton
from rl3d.kernels.rmsnorm import rms_norm
from rl3d.kernels.swiglu import swiglu

WHOLE = 4096
"""Widest rows that a program holds whole: its weights are on their way before the norm of x is known."""


@jit
def _gemv(x_ptr, norm_ptr, weight_ptr, residual_ptr, out_ptr, outputs, inputs, eps, NORM: constexpr, GLU: constexpr,
          RESIDUAL: constexpr, SINGLE: constexpr, WIDTH: constexpr, ROWS: constexpr, BLOCK: constexpr,
          STAGES: constexpr, OVERLAP: constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < outputs
    start = weight_ptr + row.to(tl.int64)[:, None] * inputs
    second = start + outputs.to(tl.int64) * inputs
    dtype = x_ptr.dtype.element_ty
    kind = out_ptr.dtype.element_ty
    if SINGLE:
        column = tl.arange(0, BLOCK)
        here = column < inputs
        real = inside[:, None] & here[None, :]
        weight = tl.load(start + column[None, :], mask=real, other=0.0)
        if GLU:
            other = tl.load(second + column[None, :], mask=real, other=0.0)
        if NORM:
            scale = tl.load(norm_ptr + column, mask=here, other=0.0).to(tl.float32)
        begin(OVERLAP)
        x = tl.load(x_ptr + column, mask=here, other=0.0).to(tl.float32)
        if NORM:
            rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / inputs + eps)
            x = ((x * rstd).to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
        out = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if GLU:
            up = tl.sum(other.to(tl.float32) * x[None, :], axis=1)
    else:
        begin(OVERLAP)
        rstd = 1.0
        if NORM:
            all_columns = tl.arange(0, WIDTH)
            whole = tl.load(x_ptr + all_columns, mask=all_columns < inputs, other=0.0).to(tl.float32)
            rstd = 1.0 / tl.sqrt(tl.sum(whole * whole, axis=0) / inputs + eps)
        sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        others = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in tl.range(0, inputs, BLOCK, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK)
            here = column < inputs
            real = inside[:, None] & here[None, :]
            weight = tl.load(start + column[None, :], mask=real, other=0.0)
            x = tl.load(x_ptr + column, mask=here, other=0.0).to(tl.float32)
            if NORM:
                scale = tl.load(norm_ptr + column, mask=here, other=0.0).to(tl.float32)
                x = ((x * rstd).to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
            sums += weight.to(tl.float32) * x[None, :]
            if GLU:
                others += tl.load(second + column[None, :], mask=real, other=0.0).to(tl.float32) * x[None, :]
        out = tl.sum(sums, axis=1)
        if GLU:
            up = tl.sum(others, axis=1)
    if GLU:
        gate = out.to(kind).to(tl.float32)
        out = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if RESIDUAL:
        out = out.to(kind).to(tl.float32) + tl.load(residual_ptr + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(kind), mask=inside)


def _run(x: Tensor, weight: Tensor, outputs: int, dtype: torch.dtype, norm: tuple[Tensor, float] | None,
         residual: Tensor | None, glu: bool) -> Tensor:  # fmt: skip
    inputs = weight.shape[1]
    out = torch.empty(1, outputs, dtype=dtype, device=x.device)
    # measured on an H200 at the shapes of models of 1.5 and 7 billion parameters
    width, single = block_of(inputs), inputs <= WHOLE
    if glu:
        rows, block, warps = (2, width, 4) if single else (4, 512, 4)
    elif not single:
        rows, block, warps = 4, 1024, 4
    elif norm is None:
        rows, block, warps = (2 if width <= 2048 else 1), width, 8
    else:
        rows, block, warps = 4, width, (8 if outputs < 65536 else 4)
    _gemv[(-(-outputs // rows),)](
        x, x if norm is None else norm[0], weight, x if residual is None else residual, out, outputs, inputs,
        0.0 if norm is None else norm[1], NORM=norm is not None, GLU=glu, RESIDUAL=residual is not None, SINGLE=single,
        WIDTH=width, ROWS=rows, BLOCK=block, STAGES=3, num_warps=warps, **overlap(x.device),
    )  # fmt: skip
    return out


def norm_gemv(x_1K: Tensor, norm: tuple[Tensor, float], weight_NK: Tensor, *, glu: bool = False,
              dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """``rms_norm(x) @ weight.T`` [1, N] in ``dtype`` (that of x), or its SwiGLU [1, N / 2]; weight and x contiguous.

    ``norm``: weight [K] and epsilon.
    """
    if use_triton(x_1K):
        outputs = weight_NK.shape[0] // 2 if glu else weight_NK.shape[0]
        return _run(x_1K, weight_NK, outputs, dtype or x_1K.dtype, norm, None, glu)
    out = rms_norm(x_1K, *norm)
    if dtype not in (None, x_1K.dtype):
        out, weight_NK = out.to(dtype), weight_NK.to(dtype)
    out = F.linear(out, weight_NK)
    return swiglu(out) if glu else out


def gemv_add(x_1K: Tensor, weight_NK: Tensor, residual_1N: Tensor) -> Tensor:
    """``residual + x @ weight.T`` [1, N]."""
    if use_triton(x_1K):
        return _run(x_1K, weight_NK, weight_NK.shape[0], x_1K.dtype, None, residual_1N, False)
    return residual_1N + F.linear(x_1K, weight_NK)
