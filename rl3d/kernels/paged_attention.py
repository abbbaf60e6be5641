"""Attention of one new token a sequence over a paged key/value cache.

A sequence's tokens are cut into splits of a fixed size, whatever the batch and however long the others are; each split
gives a partial softmax and a second kernel joins them in rising order (the scheme of Flash-Decoding). So a row's bits
depend on its own tokens only. All query heads of a key/value head are one program: keys and values are read once.

Shape legend: B sequences, H query heads, G key/value heads, D head size, P pages of the pool, S tokens a page, M pages
that a row of the table names.
"""

from functools import lru_cache

import torch
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, interpreted, jit, overlap, tl, use_triton

SPLIT = 256
"""Tokens of a split. Constant, because a sum's bits depend on it."""

_LOG2_E = 1.4426950408889634


@jit
def _partial(q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, sums_ptr, parts_ptr, heads, table_stride, page_stride,
             token_stride, head_stride, scale, GROUP: constexpr, ROWS: constexpr, SIZE: constexpr, WIDTH: constexpr,
             PAGE: constexpr, TOKENS: constexpr, PART: constexpr, PARTS: constexpr,
             WIDE: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    sequence, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    first = part * PART
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    if first < length:
        last = tl.minimum(length, first + PART)
        at = (sequence * heads + head)[:, None] * SIZE + column[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        top = tl.full((ROWS,), -1e30, dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for start in range(first, last, TOKENS):
            token = start + tl.arange(0, TOKENS)
            here = token < last
            page = tl.load(table_ptr + sequence * table_stride + token // PAGE, mask=here, other=0).to(tl.int64)
            place = page * page_stride + (token % PAGE) * token_stride + kv_head * head_stride
            real = here[:, None] & (column < SIZE)[None, :]
            k = tl.load(k_ptr + place[:, None] + column[None, :], mask=real, other=0.0)
            v = tl.load(v_ptr + place[:, None] + column[None, :], mask=real, other=0.0)
            if WIDE:
                q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            logits = tl.where(here[None, :], logits, -1e30)
            new_top = tl.maximum(top, tl.max(logits, axis=1))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(logits - new_top[:, None])
            sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            total = total * shrink + tl.sum(weight, axis=1)
            top = new_top
        sums = sums / total[:, None]
        if PARTS == 1:
            tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            at = (sequence * heads + head) * PARTS + part
            tl.store(sums_ptr + at[:, None] * SIZE + column[None, :], sums, mask=inside)
            tl.store(parts_ptr + at, top + tl.log2(total), mask=row < GROUP)
    elif PARTS == 1:
        at = (sequence * heads + head)[:, None] * SIZE + column[None, :]
        tl.store(out_ptr + at, tl.zeros((ROWS, WIDTH), dtype=out_ptr.dtype.element_ty), mask=inside)


@jit
def _join(lengths_ptr, out_ptr, sums_ptr, parts_ptr, heads, SIZE: constexpr, WIDTH: constexpr, PART: constexpr,
          PARTS: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row // heads)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    top, total = -1e30, 0.0
    out = tl.zeros((WIDTH,), dtype=tl.float32)
    for part in range(0, tl.cdiv(length, PART)):
        lse = tl.load(parts_ptr + row * PARTS + part)
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        out = out * shrink + weight * tl.load(sums_ptr + (row * PARTS + part) * SIZE + column, mask=inside, other=0.0)
        total = total * shrink + weight
        top = new_top
    out = out / tl.maximum(total, 1e-30)
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_decode(q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, lengths: Tensor,
                 scale: float) -> Tensor:  # fmt: skip
    """Softmax attention of each sequence's newest token over its cached tokens, itself included: [B, H, D].

    A row of length 0 gives zeros. Nothing here waits for the device, so the call can be captured in a CUDA graph.

    Args:
        q_BHD: rotated queries, contiguous; H a multiple of G, query heads that share a key/value head side by side.
        k_pool, v_pool: [P, S, G, D] of one layer, same strides, D contiguous. The newest token is in them already.
        block_table: integer [B, M], the pages of each sequence in order; entries past its length are not read.
        lengths: integer [B], tokens of each sequence, at most M * S.
        scale: of the logits, usually 1 / sqrt(D).
    """
    batch, heads, size = q_BHD.shape
    _, page_size, kv_heads, _ = k_pool.shape
    if not use_triton(q_BHD):
        return _gathered(q_BHD, k_pool, v_pool, block_table, lengths, scale)
    out = torch.empty_like(q_BHD)
    if not batch:
        return out
    parts = -(-block_table.shape[1] * page_size // SPLIT)
    group, width = heads // kv_heads, max(16, block_of(size))
    tokens = 128 if q_BHD.dtype != torch.float32 else 32
    sums, lse = out, lengths  # never touched when there is one part
    if parts > 1:
        sums = torch.empty(batch, heads, parts, size, dtype=torch.float32, device=out.device)
        lse = torch.empty(batch, heads, parts, dtype=torch.float32, device=out.device)
    _partial[(batch, kv_heads, parts)](
        q_BHD, k_pool, v_pool, block_table, lengths, out, sums, lse, heads, block_table.stride(0), k_pool.stride(0),
        k_pool.stride(1), k_pool.stride(2), scale * _LOG2_E, GROUP=group, ROWS=max(16, block_of(group)), SIZE=size,
        WIDTH=width, PAGE=page_size, TOKENS=tokens, PART=SPLIT, PARTS=parts,
        WIDE=interpreted(),  # whose tl.dot takes the bits of bfloat16 for integers
        num_warps=4, num_stages=_stages(q_BHD.device, 2 * tokens * width * q_BHD.element_size()),
        **overlap(q_BHD.device),
    )  # fmt: skip
    if parts > 1:
        _join[(batch * heads,)](lengths, out, sums, lse, heads, SIZE=size, WIDTH=width, PART=SPLIT, PARTS=parts, num_warps=1,
                               **overlap(q_BHD.device))  # fmt: skip
    return out


@lru_cache
def _stages(device: torch.device, nbytes: int) -> int:
    """Tiles of keys and values, ``nbytes`` a pair, to have on their way: up to 2, in two thirds of the shared memory."""
    if device.type != "cuda":
        return 1
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 98304)
    return max(1, min(2, 2 * shared // 3 // nbytes))


def _gathered(q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    batch, heads, size = q_BHD.shape
    kv_heads = k_pool.shape[2]
    longest = int(lengths.max()) if batch else 0
    inside = torch.arange(longest, device=q_BHD.device)[None] < lengths[:, None]
    pages = block_table[:, : -(-longest // k_pool.shape[1])].long()
    pages = pages.masked_fill(~inside[:, :: k_pool.shape[1]], 0)
    keys, values = (pool[pages].flatten(1, 2)[:, :longest].float() for pool in (k_pool, v_pool))
    # what no sequence owns may hold anything: 0 * NaN is NaN
    keys, values = (x.masked_fill(~inside[:, :, None, None], 0.0) for x in (keys, values))
    grouped = q_BHD.float().view(batch, kv_heads, heads // kv_heads, size)
    logits = torch.einsum("bghd,btgd->bght", grouped, keys) * scale
    logits = logits.masked_fill(~inside[:, None, None], -1e30)
    weight = logits.softmax(-1) * inside[:, None, None]
    return torch.einsum("bght,btgd->bghd", weight, values).reshape(batch, heads, size).to(q_BHD.dtype)
