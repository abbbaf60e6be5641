"""The kernels of a decode step against float64 arithmetic written without pages; errors as tests.kernels.checks has them."""

import torch
from torch import Tensor

from rl3d.kernels import add_rms_norm, gemv_add, norm_gemv, paged_decode, rms_norm, rotary, rotate_append

EPS = 1e-5


def error(found: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest value; infinite when something is no number."""
    found, right = found.detach(), right.detach()
    gap = (found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-30)
    return float(gap) if bool(found.isfinite().all()) else float("inf")


def _pools(pages: int, page_size: int, kv_heads: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Keys and values of a layer with NaN everywhere: what nobody wrote must not be read."""
    return torch.full((2, pages, page_size, kv_heads, size), float("nan"), dtype=dtype, device=device)


def _tables(lengths: list[int], page_size: int, spare: int, device: str) -> Tensor:
    """Pages in a shuffled order; entries behind a sequence's last page name a page outside the pool."""
    need = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(2)).split(need)
    table = torch.full((len(lengths), max(need) + spare), 10**6, dtype=torch.int32)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages.to(torch.int32)
    return table.to(device)


def attention(dtype: torch.dtype, device: str) -> dict[str, float]:
    out = {}
    g = torch.Generator().manual_seed(4)
    for heads, kv_heads, size, page_size, lengths in (
        (4, 4, 32, 16, [1, 16, 17, 40]), (12, 2, 128, 64, [3, 257, 520]), (7, 1, 64, 16, [300, 1]),
        (6, 2, 96, 32, [65]), (2, 1, 256, 32, [33, 256]),
    ):  # fmt: skip
        table = _tables(lengths, page_size, 1, device)
        pools = _pools(int(sum(-(-n // page_size) for n in lengths)), page_size, kv_heads, size, dtype, device)
        q = torch.randn(len(lengths), heads, size, generator=g).to(device, dtype)
        right = []
        for row, length in enumerate(lengths):
            keys, values = torch.randn(2, length, kv_heads, size, generator=g).to(device, dtype)
            for position in range(length):
                page = int(table[row, position // page_size])
                pools[0, page, position % page_size], pools[1, page, position % page_size] = keys[position], values[position]
            k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
            logits = torch.einsum("hd,thd->ht", q[row].double(), k) * size**-0.5
            right.append(torch.einsum("ht,thd->hd", logits.softmax(-1), v))
        count = torch.tensor(lengths, dtype=torch.int32, device=device)
        found = paged_decode(q, *pools, table, count, size**-0.5)
        name = f"paged_decode/{str(dtype).removeprefix('torch.')}/{heads}:{kv_heads}x{size}/{page_size}"
        out[name] = error(found, torch.stack(right))
        # a row's bits must not depend on the batch, nor on how many pages the table could name
        alone = (
            paged_decode(q[1:2], *pools, table[1:2, :-1].contiguous(), count[1:2], size**-0.5) if len(lengths) > 1 else None
        )
        if alone is not None and q.is_cuda:
            assert torch.equal(alone[0], found[1]), name
        nothing = paged_decode(q[:1], *pools, table[:1], torch.zeros_like(count[:1]), 1.0)
        assert not nothing.any(), "a row without tokens is zero"
    return out


def append(dtype: torch.dtype, device: str) -> dict[str, float]:
    out = {}
    g = torch.Generator().manual_seed(6)
    for heads, kv_heads, size, bias, norm, packed in (
        (4, 2, 32, False, False, False), (3, 3, 64, True, False, True), (6, 1, 128, True, True, False),
        (2, 1, 48, False, True, True),
    ):  # fmt: skip
        lengths, page_size = [5, 33, 70], 16
        table = _tables(lengths, page_size, 0, device)
        table = torch.cat([table, torch.zeros_like(table[:1])])
        pools = _pools(int(table[table < 10**6].max()) + 1, page_size, kv_heads, size, dtype, device)
        positions = torch.tensor([4, 32, 69, 7, 0] if packed else [4, 32, 69], device=device)
        rows = torch.tensor([0, 1, 2, 1, 2], device=device) if packed else None
        groups = heads // kv_heads
        qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * size, generator=g).to(device, dtype)
        shift = torch.randn(qkv.shape[1], generator=g).to(device, dtype) if bias else None
        weights = torch.randn(2, size, generator=g).to(device, dtype)
        angles = torch.randn(80, size // 2, generator=g).to(device) * 30
        norms = (*weights, EPS) if norm else None
        if not packed:  # a row that pads the batch
            padded = torch.cat([qkv, qkv[:1]]), torch.cat([positions, torch.full_like(positions[:1], -1)])
            q = rotate_append(padded[0], shift, norms, angles.cos(), angles.sin(), padded[1], table, *pools)[:-1]
        else:
            kept = torch.full((2, len(positions), kv_heads, size), float("nan"), dtype=dtype, device=device)
            q = rotate_append(qkv, shift, norms, angles.cos(), angles.sin(), positions, table, *pools, rows, tuple(kept))
        x = (qkv if shift is None else qkv + shift).view(len(positions), kv_heads, groups + 2, size)
        right_q, right_k, right_v = x[:, :, :-2].flatten(1, 2), x[:, :, -2], x[:, :, -1]
        if norm:
            right_q, right_k = rms_norm(right_q, weights[0], EPS), rms_norm(right_k, weights[1], EPS)
        turn = (angles[positions].cos(), angles[positions].sin())
        which = range(len(positions)) if rows is None else rows.tolist()
        at = [(int(table[r, p // page_size]), p % page_size) for r, p in zip(which, positions.tolist(), strict=True)]
        found_k, found_v = (torch.stack([pool[page, offset] for page, offset in at]) for pool in pools)
        if packed:
            assert torch.equal(kept[0], found_k) and torch.equal(kept[1], found_v), "what is kept is what is stored"
        assert int(pools[0, :, :, 0, 0].isfinite().sum()) == len(positions), "only these tokens were written"
        name = f"rotate_append/{str(dtype).removeprefix('torch.')}/{heads}:{kv_heads}x{size}"
        pairs = ((q, rotary(right_q, *turn)), (found_k, rotary(right_k, *turn)), (found_v, right_v))
        out[name] = max(error(a, b) for a, b in pairs)
    x, residual, weight = (torch.randn(*shape, generator=g).to(device, dtype) for shape in ((9, 130), (9, 130), (130,)))
    normed, total = add_rms_norm(x, residual, weight, EPS)
    out[f"add_rms_norm/{str(dtype).removeprefix('torch.')}/sum"] = error(total, x + residual)
    right = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    out[f"add_rms_norm/{str(dtype).removeprefix('torch.')}"] = error(normed, right)
    return out


def products(dtype: torch.dtype, device: str) -> dict[str, float]:
    """One row: the norm, the product, SwiGLU and the residual as one kernel."""
    out = {}
    g = torch.Generator().manual_seed(8)
    for inputs, outputs in ((96, 10), (1300, 34), (5000, 6)):  # the last in several blocks
        x, residual, scale, weight = (
            torch.randn(*shape, generator=g).to(device, dtype)
            for shape in ((1, inputs), (1, outputs), (inputs,), (outputs, inputs))
        )
        normed = x.double() * (x.double().square().mean() + EPS).rsqrt() * scale.double()
        product = normed @ weight.double().t()
        gate, up = product.chunk(2, dim=-1)
        name = f"{str(dtype).removeprefix('torch.')}/{outputs}x{inputs}"
        out[f"norm_gemv/{name}"] = error(norm_gemv(x, (scale, EPS), weight), product)
        wide = norm_gemv(x, (scale, EPS), weight, dtype=torch.float32)
        assert wide.dtype == torch.float32
        out[f"norm_gemv/{name}/wide"] = error(wide, product)
        out[f"norm_gemv_glu/{name}"] = error(norm_gemv(x, (scale, EPS), weight, glu=True), gate * torch.sigmoid(gate) * up)
        out[f"gemv_add/{name}"] = error(gemv_add(x, weight, residual), x.double() @ weight.double().t() + residual.double())
    return out


def main(device: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        out |= attention(dtype, device) | append(dtype, device) | products(dtype, device)
    return out
