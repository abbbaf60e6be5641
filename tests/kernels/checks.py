"""Each kernel against float64 arithmetic with autograd, on one device; prints the largest errors as JSON.

python -m tests.kernels.checks cpu      torch's path, or Triton's interpreter with TRITON_INTERPRET=1
python -m tests.kernels.checks cuda     the compiled kernels
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from rl3d.kernels import backend, fp32_logits, logprob_gradient, logprob_statistics, rms_norm, rotary, swiglu
from tests.kernels import copy_checks, decode_checks
from tests.kernels.decode_checks import error

EPS = 1e-5


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _glu64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _rotary64(x: Tensor, angles: Tensor) -> Tensor:
    """transformers' own: x * cos + rotate_half(x) * sin, with the angles given twice."""
    twice = torch.cat([angles, angles], dim=-1).double()[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * twice.cos() + torch.cat([-second, first], dim=-1) * twice.sin()


def _compare(ours: Callable[..., Tensor], right: Callable[..., Tensor], *inputs: Tensor) -> float:
    mine = [t.detach().clone().requires_grad_() for t in inputs]
    theirs = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = ours(*mine), right(*theirs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    found = torch.autograd.grad(out, mine, grad)
    wanted = torch.autograd.grad(expected, theirs, grad.double())
    return max(error(a, b) for a, b in zip((out, *found), (expected, *wanted), strict=True))


def _logprobs(logits: Tensor, labels: Tensor, valid: int, scale: float) -> tuple[float, float]:
    """Two vocabulary shards, combined by hand, against log_softmax and the entropy's own gradient in float64."""
    exact = logits[:, :valid].double().requires_grad_()
    logp = torch.log_softmax(exact * scale, dim=-1)
    right_lp = logp.gather(1, labels[:, None])[:, 0]
    right_entropy = -(logp.exp() * logp).sum(-1)
    d_lp, d_entropy = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(5)).to(logits.device)
    (right_grad,) = torch.autograd.grad((right_lp * d_lp.double() + right_entropy * d_entropy.double()).sum(), exact)
    half = logits.shape[1] // 2
    shards = [(logits[:, :half].contiguous(), labels, min(valid, half)),
              (logits[:, half:].contiguous(), labels - half, max(valid - half, 0))]  # fmt: skip
    stats = [logprob_statistics(z, y, v, scale) for z, y, v in shards]
    top = torch.stack([s[:, 0] for s in stats]).amax(0)
    total = sum((s[:, 0] - top).exp() * s[:, 1] for s in stats)
    weighted = sum((s[:, 0] - top).exp() * (s[:, 2] + (s[:, 0] - top) * s[:, 1]) for s in stats)
    chosen = sum(torch.where((y >= 0) & (y < v), s[:, 3] - top, 0.0) for s, (_, y, v) in zip(stats, shards, strict=True))
    lp, entropy = chosen - total.log(), total.log() - weighted / total
    grads = [logprob_gradient(z, y, total.log() + top, entropy, d_lp, d_entropy, v, scale, torch.float32)
             for z, y, v in shards]  # fmt: skip
    grad = torch.cat(grads, dim=1)
    assert not grad[:, valid:].any(), "padding has no gradient"
    return max(error(lp, right_lp), error(entropy, right_entropy)), error(grad[:, :valid], right_grad)


def main(device: str) -> dict[str, float]:
    g = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=g).to(device=device, dtype=dtype)

    out: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for rows, width in ((1, 64), (37, 96), (61, 130)):
            x, weight = randn(rows, width, dtype=dtype) * 3, randn(width, dtype=dtype)
            out[f"rms_norm/{name}/{rows}x{width}"] = _compare(lambda x, w: rms_norm(x, w, EPS), _norm64, x, weight)
            x = randn(rows, 2, width, dtype=dtype)
            out[f"swiglu/{name}/{rows}x{width}"] = _compare(swiglu, _glu64, x)
        for heads, size in ((1, 16), (5, 48), (18, 64)):
            mixed, angles = randn(23, heads + 2, size, dtype=dtype), randn(23, size // 2) * 50
            x = mixed[:, 1 : heads + 1]  # a view, as queries are of the fused projection
            out[f"rotary/{name}/{heads}x{size}"] = _compare(lambda x, a=angles: rotary(x, a.cos(), a.sin()),
                                                            lambda x, a=angles: _rotary64(x, a), x)  # fmt: skip
        h, w = randn(5, 64, dtype=dtype), randn(33, 64, dtype=dtype)
        out[f"fp32_logits/{name}"] = error(fp32_logits(h, w), h.double() @ w.double().t())
        assert fp32_logits(h, w).dtype == torch.float32
    for valid in (201, 100, 60):  # padding in the second shard, all of it, and reaching into the first
        logits, labels = randn(9, 204) * 8, torch.randint(0, valid, (9,), generator=g).to(device)
        for scale in (1.0, 1 / 0.7):
            values, gradient = _logprobs(logits, labels, valid, scale)
            out[f"logprob/{valid}/{scale:.2f}"], out[f"logprob_gradient/{valid}/{scale:.2f}"] = values, gradient
    empty = torch.zeros(0, 64, device=device, requires_grad=True)
    assert rms_norm(empty, torch.ones(64, device=device), EPS).shape == (0, 64) and swiglu(empty).shape == (0, 32)
    return out | decode_checks.main(device) | copy_checks.main(device)


if __name__ == "__main__":
    device = sys.argv[1]
    print(json.dumps({"triton": backend.use_triton(torch.zeros(1, device=device)), "errors": main(device)}))
