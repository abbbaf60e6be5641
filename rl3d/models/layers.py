"""The modules that rl3d puts into megatron-core's layer specification: RMSNorm, SwiGLU and core attention.

Shape legend: T tokens of a packed row, B batch (1 when packed), H query heads, G key/value heads, D head size.
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl3d.kernels import rms_norm, swiglu


class RMSNorm(torch.nn.Module):
    """RMS normalisation that computes in fp32, as transformers does, and that sequence parallelism may use.

    megatron-core's local norm refuses sequence parallelism; marking the weight is all that it takes.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


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
        if self.flash and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _VARLEN is not None:
            out = _varlen(q, k, v, packed_seq_params, self.scale)
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


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Any, scale: float) -> Tensor:
    """torch's variable-length attention; its signature grew between 2.11 and 2.14."""
    options: dict[str, Any] = {"scale": scale} if "scale" in _VARLEN_ARGUMENTS else {}
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _VARLEN_ARGUMENTS:
            options["enable_gqa"] = True
        else:
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return _VARLEN(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest, **options)
