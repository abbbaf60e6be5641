"""Between the matrix products of a decode step: everything from the QKV projection to the queries in one kernel, and the
residual addition with the norm that follows it in another.

Each rounds to the dtype of its input where the separate operations round, so both give the same bits.

Shape legend: T tokens, H query heads, G key/value heads, D head size, P pages, S tokens a page, N rows.
"""

import torch
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, jit, overlap, tl, use_triton
from rl3d.kernels.rmsnorm import rms_norm
from rl3d.kernels.rotary import rotary


@jit
def _append(qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, table_ptr, rows_ptr, q_ptr, k_ptr,
            v_ptr, key_ptr, value_ptr, tokens, table_stride, page_stride, token_stride, head_stride, eps, GROUP: constexpr,
            GROUPS: constexpr, HALF: constexpr, WIDTH: constexpr, PAGE: constexpr, BIAS: constexpr, NORM: constexpr,
            ROWS: constexpr, KEEP: constexpr, TOKENS: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    group, kind = head // (GROUP + 2), head % (GROUP + 2)  # of each key/value head: its query heads, its key, its value
    column = tl.arange(0, WIDTH)
    here = column < HALF
    there = token < tokens
    inside = there[:, None] & here[None, :]
    dtype = q_ptr.dtype.element_ty
    at = qkv_ptr + ((token * GROUPS * (GROUP + 2) + head) * (2 * HALF))[:, None] + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        at = bias_ptr + head * (2 * HALF) + column
        first = (first + tl.load(at, mask=here, other=0.0).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        second = (second + tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    position = tl.load(positions_ptr + token, mask=there, other=-1)
    live = (position >= 0)[:, None]
    position = tl.maximum(position, 0)
    if kind <= GROUP:
        if NORM:
            weight_ptr = q_norm_ptr
            if kind == GROUP:
                weight_ptr = k_norm_ptr
            square = tl.sum(first * first + second * second, axis=1)
            rstd = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
            low = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)[None, :]
            high = tl.load(weight_ptr + HALF + column, mask=here, other=0.0).to(tl.float32)[None, :]
            first = ((first * rstd).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
            second = ((second * rstd).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
        angle = (position * HALF)[:, None] + column[None, :]
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if kind < GROUP:
        to = q_ptr + (((token * GROUPS + group) * GROUP + kind) * (2 * HALF))[:, None] + column[None, :]
    else:
        row = token
        if ROWS:
            row = tl.load(rows_ptr + token, mask=there, other=0).to(tl.int64)
        page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=there, other=0).to(tl.int64)
        place = (page * page_stride + (position % PAGE) * token_stride + group * head_stride)[:, None] + column[None, :]
        if kind == GROUP:
            to = k_ptr + place
            kept = key_ptr
        else:
            to = v_ptr + place
            kept = value_ptr
        if KEEP:
            out = kept + ((token * GROUPS + group) * (2 * HALF))[:, None] + column[None, :]
            tl.store(out, first.to(dtype), mask=inside)
            tl.store(out + HALF, second.to(dtype), mask=inside)
    tl.store(to, first.to(dtype), mask=inside & live)
    tl.store(to + HALF, second.to(dtype), mask=inside & live)


def rotate_append(qkv: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
                  positions: Tensor, block_table: Tensor, k_pool: Tensor, v_pool: Tensor, rows: Tensor | None = None,
                  kept: tuple[Tensor, Tensor] | None = None) -> Tensor:  # fmt: skip
    """Bias, query and key norm, rotation; keys and values go into their pages. Queries [T, H, D] come back.

    Args:
        qkv: [T, (H + 2 G) * D], for each key/value head its query heads, its key and its value; contiguous.
        bias: of the same width, or ``None``.
        norms: weights [D] of the RMS norms of each query and each key head, and their epsilon; or ``None``.
        cos, sin: fp32 [positions, D / 2], contiguous; multiplied already where the variant of RoPE scales them.
        positions: integer [T]; a negative one marks a row that pads the batch: nothing is stored, its queries are junk.
        block_table: int32 or int64, pages of each sequence in order.
        k_pool, v_pool: [P, S, G, D], same strides, D contiguous.
        rows: integer [T], row of the table of each token; ``None``: token t belongs to row t.
        kept: contiguous [T, G, D] each; gets the keys and the values, too, for attention among these tokens.
    """
    tokens, width = qkv.shape
    _, page_size, groups, size = k_pool.shape
    group = width // (groups * size) - 2
    if use_triton(qkv):
        q = torch.empty(tokens, groups * group, size, dtype=qkv.dtype, device=qkv.device)
        if tokens:
            q_norm, k_norm, eps = (qkv, qkv, 0.0) if norms is None else norms
            together = 1 if rows is None else 16  # prompts have many
            _append[(-(-tokens // together), groups * (group + 2))](
                qkv, qkv if bias is None else bias, q_norm, k_norm, cos, sin, positions, block_table,
                positions if rows is None else rows, q, k_pool, v_pool, *(kept or (q, q)), tokens, block_table.stride(0),
                k_pool.stride(0), k_pool.stride(1), k_pool.stride(2), eps, GROUP=group, GROUPS=groups, HALF=size // 2,
                WIDTH=block_of(size // 2), PAGE=page_size, BIAS=bias is not None, NORM=norms is not None,
                ROWS=rows is not None, KEEP=kept is not None, TOKENS=together, num_warps=1 if together == 1 else 4,
                **overlap(qkv.device),
            )  # fmt: skip
        return q
    x = (qkv if bias is None else qkv + bias).view(tokens, groups, group + 2, size)
    q, k, v = x[:, :, :group].flatten(1, 2), x[:, :, group], x[:, :, group + 1]
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    live = positions >= 0
    positions = positions.clamp(min=0)
    table = tuple(t.index_select(0, positions) for t in (cos, sin))
    page = block_table[torch.arange(tokens, device=qkv.device) if rows is None else rows, positions // page_size].long()
    at = (page[live], positions[live] % page_size)
    k = rotary(k, *table)
    k_pool[at], v_pool[at] = k[live], v[live]
    if kept is not None:
        kept[0].copy_(k)
        kept[1].copy_(v)
    return rotary(q, *table)


@jit
def _add_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, width, eps, BLOCK: constexpr, OVERLAP: constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(OVERLAP)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype)
    tl.store(sum_ptr + row * width + columns, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(out_ptr + row * width + columns, ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def add_rms_norm(x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMS norm of ``x + residual``, ``x + residual``), contiguous [N, H] each; no gradient."""
    if not use_triton(x_NH):
        total_NH = residual_NH + x_NH
        return rms_norm(total_NH, weight_H, eps), total_NH
    out_NH, total_NH = torch.empty_like(x_NH), torch.empty_like(x_NH)
    rows, width = x_NH.shape
    if rows:
        block = block_of(width)
        _add_norm[(rows,)](x_NH, residual_NH, weight_H, out_NH, total_NH, width, eps, BLOCK=block,
                           num_warps=8 if block >= 2048 else 4, **overlap(x_NH.device))  # fmt: skip
    return out_NH, total_NH
