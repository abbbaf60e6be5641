"""The modules that rl3d puts into megatron-core's layer specification: norms, SwiGLU and core attention.

Shape legend: T tokens of a packed row, B batch (1 when packed), H query heads, G key/value heads, D head size.
"""

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from rl3d.kernels import rms_norm, rotary, swiglu


class RMSNorm(torch.nn.Module):
    """RMS normalisation that computes in fp32, as transformers does, and that sequence parallelism may use.

    megatron-core's local norm refuses sequence parallelism; marking the weight is all that it takes.

    Args:
        config, hidden_size, eps: as megatron-core's layer builders pass them.
        late_rounding: multiply by the weight before rounding to a 16-bit dtype (olmo2), not after.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, *, late_rounding: bool = False, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.late_rounding = eps, late_rounding

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> same shape and dtype."""
        if self.late_rounding and x.dtype != torch.float32:
            return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """RMS norm of each query or key head by itself, one weight for all of them (qwen3).

    A rank sees its own heads only, sequence parallelism or not: the gradients of the copies of the weight are parts,
    and the training engine adds them up.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: Any):
        super().__init__(config, hidden_size, eps, **options)
        _mark_partial(self.weight)


class ProjectionNorm(torch.nn.Module):
    """RMS norm of queries or keys over all heads together, one weight for each row of the projection (olmo2).

    Under tensor parallelism the mean square spans the ranks. Every rank holds the whole weight, which is small, and
    uses the rows of its heads; with more ranks than key heads several ranks share one.

    Args:
        config, hidden_size, eps: as megatron-core's attention passes them; ``hidden_size`` is one head's.
        heads: heads of the whole projection.
        group: the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, *, heads: int, group: Any, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))
        _mark_partial(self.weight)
        self.eps, self.group = eps, group
        self.ranks = 1 if group is None else group.size()
        copies = max(1, self.ranks // heads)  # ranks that hold the same head
        here = max(1, heads // self.ranks) * hidden_size
        first = (0 if group is None else group.rank()) // copies * here
        self.rows = slice(first, first + here)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads here, head_dim] -> same shape and dtype."""
        flat = x.flatten(-2).float()
        square = flat.pow(2).mean(-1, keepdim=True)
        if self.ranks > 1:
            square = _MeanOverRanks.apply(square, self.group)
        out = flat * torch.rsqrt(square + self.eps) * self.weight[self.rows]
        return out.to(x.dtype).view(x.shape)


class _MeanOverRanks(torch.autograd.Function):
    """Mean over ``group``. Each rank's loss is a part of the whole, so the gradient is the mean as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _mean(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _mean(grads[0], ctx.group), None


def _mean(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x / group.size()


def _mark_partial(weight: torch.nn.Parameter) -> None:
    """Copies of this weight on the tensor-parallel ranks get parts of its gradient, whatever the layout."""
    weight.sequence_parallel = False  # type: ignore[attr-defined]
    weight.sum_gradient_over_tp = True  # type: ignore[attr-defined]


class RowParallelNormed(RowParallelLinear):
    """A row-parallel projection followed by an RMS norm, before the residual is added (olmo2)."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        super().__init__(*args, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, self.output_size, config.layernorm_epsilon, late_rounding=True)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the parent: (output, bias or None)."""
        out, bias = super().forward(input_)
        return self.post_layernorm(out), bias


class SwiGLU(torch.nn.Module):
    """The activation between the two MLP projections; megatron-core hands it the fused [gate; up] of this rank."""

    def __init__(self, config: Any, **_: Any):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 2 * ffn / tp] -> [..., ffn / tp]."""
        return swiglu(x)


class PackedAttention(torch.nn.Module):
    """Causal core attention on ``scaled_dot_product_attention``, over packed rows or plain batches.

    With ``packed_seq_params`` the row holds several sequences end to end (``cu_seqlens_q``); no token sees another
    sequence. On CUDA in half precision this is one variable-length flash-attention call.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, *,
                 softmax_scale: float | None = None, **_: Any):  # fmt: skip
        super().__init__()
        self.flash = getattr(config, "use_flash_attention", True)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
                **_: Any) -> Tensor:  # fmt: skip
        """query [T, B, H, D], key and value [T, B, G, D] -> [T, B, H * D]."""
        if packed_seq_params is None:
            out = _causal(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if packed_seq_params.rotary is not None:
            q, k = rotary(q, *packed_seq_params.rotary), rotary(k, *packed_seq_params.rotary)
        if self.flash and has_varlen_attention(q):
            out = varlen_attention(q, k, v, packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q, self.scale)
        else:
            sequences = zip(*(t.split(packed_seq_params.lengths) for t in (q, k, v)), strict=True)
            out = torch.cat([_one_sequence(q, k, v, self.scale) for q, k, v in sequences])
        return out.reshape(out.shape[0], 1, -1)


def _causal(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scale: float) -> Tensor:
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, scale=scale, enable_gqa=grouped)


def _one_sequence(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_TGD, v_TGD))
    return _causal(q, k, v, scale)[0].transpose(0, 1)


try:
    from torch.nn.attention import varlen as _module

    _VARLEN: Any = _module.varlen_attn
    _VARLEN_ARGUMENTS = frozenset(inspect.signature(_VARLEN).parameters)
except ImportError:
    _VARLEN, _VARLEN_ARGUMENTS = None, frozenset()


def has_varlen_attention(x: Tensor) -> bool:
    """Whether :func:`varlen_attention` takes tensors like ``x``: half precision on CUDA."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _VARLEN is not None


def varlen_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cumulative: Tensor, longest: int,
                     scale: float | None) -> Tensor:  # fmt: skip
    """Causal attention inside each sequence of a packed row; ``cumulative`` int32 [sequences + 1] are their borders.

    One flash kernel; torch's signature of it grew between 2.11 and 2.14.
    """
    options: dict[str, Any] = {"scale": scale} if "scale" in _VARLEN_ARGUMENTS else {}
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    if q_THD.shape[1] != k_TGD.shape[1] and "enable_gqa" in _VARLEN_ARGUMENTS:  # 2.11 groups queries without being told
        options["enable_gqa"] = True
    q, k, v = (x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    return _VARLEN(q, k, v, cumulative, cumulative, longest, longest, **options)
