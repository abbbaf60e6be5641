"""One decode step over paged pools, in as few kernels as the layers allow: eight and two products a layer.

The same parameters and the same arithmetic as :class:`rl3d.generation.lean.LeanBody`; nothing waits for the host and no
address changes between steps, so a step can be captured in a CUDA graph.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from rl3d.generation import lean
from rl3d.kernels import (
    add_rms_norm,
    fp32_logits,
    gemv_add,
    norm_gemv,
    paged_decode,
    rms_norm,
    rotate_append,
    swiglu,
)
from rl3d.models.layers import ProjectionNorm, RMSNorm


class PagedPools(Protocol):
    """Where keys and values of a layer are: two pools [pages, page_size, kv_heads, head_dim] of the same strides."""

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def reason_against(model: GPTModel, tp: int) -> str | None:
    """Why :class:`DecodeBody` cannot compute ``model``; ``None`` when it can."""
    reason = lean.reason_against(model, tp)
    if reason is not None:
        return reason
    for layer in model.decoder.layers:
        for name, norm in (("before attention", layer.input_layernorm), ("before the MLP", layer.pre_mlp_layernorm)):
            if not isinstance(norm, RMSNorm) or norm.late_rounding:
                return f"the norm {name} is {type(norm).__name__}, expected an RMS norm that rounds before its weight"
        if isinstance(layer.self_attention.q_layernorm, ProjectionNorm):
            return "query and key norms span all heads"
        if any(hasattr(m, "post_layernorm") for m in (layer.self_attention.linear_proj, layer.mlp.linear_fc2)):
            return "norms follow the projections"
    return None


class DecodeBody:
    """See the module. ``tp_group`` is ``None`` on one rank; ``max_positions``: longest sequence, prompt and response."""

    def __init__(self, model: GPTModel, cache: PagedPools, tp_group: dist.ProcessGroup | None, max_positions: int) -> None:
        self.model: Any = model
        self.cache, self.group = cache, tp_group
        attention = model.decoder.layers[0].self_attention
        self.scale = model.config.softmax_scale or attention.hidden_size_per_attention_head**-0.5
        weight = self.model.embedding.word_embeddings.weight
        angles = model.rotary_pos_emb(max_positions)[:, 0, 0, : attention.hidden_size_per_attention_head // 2]
        angles, amplitude = angles.to(weight.device, torch.float32), attention._yarn_concentration_factor
        self.cos, self.sin = ((f(angles) * amplitude).contiguous() for f in (torch.cos, torch.sin))

    def forward(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Logits [B, padded_vocab / tp], fp32.

        Args:
            tokens_B: int64, the newest token of each sequence.
            positions_B: its index; negative in rows that pad the batch, whose logits mean nothing.
            table: int32 [B, pages], pages of each sequence.
        """
        model, layers = self.model, self.model.decoder.layers
        alone = len(tokens_B) == 1 and self.group is None  # time to read the weights with kernels made for one row
        lengths_B = (positions_B + 1).to(torch.int32)
        x = model.embedding.word_embeddings(tokens_B)
        norm = layers[0].input_layernorm
        normed = x if alone else rms_norm(x, norm.weight, norm.eps)
        for index, layer in enumerate(layers):
            attention, mlp = layer.self_attention, layer.mlp
            last = index + 1 == len(layers)
            before, between = layer.input_layernorm, layer.pre_mlp_layernorm
            after = model.decoder.final_layernorm if last else layers[index + 1].input_layernorm
            if alone:
                qkv = norm_gemv(x, (before.weight, before.eps), attention.linear_qkv.weight)
                x = gemv_add(
                    self._attend(index, attention, qkv, positions_B, table, lengths_B), attention.linear_proj.weight, x
                )
                hidden = norm_gemv(x, (between.weight, between.eps), mlp.linear_fc1.weight, glu=True)
                x = gemv_add(hidden, mlp.linear_fc2.weight, x)
                continue
            qkv = F.linear(normed, attention.linear_qkv.weight)
            out = self._attend(index, attention, qkv, positions_B, table, lengths_B)
            normed, x = add_rms_norm(self._project(out, attention.linear_proj), x, between.weight, between.eps)
            out = self._project(swiglu(F.linear(normed, mlp.linear_fc1.weight)), mlp.linear_fc2)
            normed, x = add_rms_norm(out, x, after.weight, after.eps)
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        if alone:
            norm = model.decoder.final_layernorm
            return norm_gemv(x, (norm.weight, norm.eps), weight, dtype=torch.float32)
        return fp32_logits(normed, weight)

    def _attend(self, index: int, attention: Any, qkv: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor,
                lengths_B: torch.Tensor) -> torch.Tensor:  # fmt: skip
        norms = None
        if attention.q_layernorm is not None:
            norms = (attention.q_layernorm.weight, attention.k_layernorm.weight, attention.q_layernorm.eps)
        keys, values = self.cache.pools(index)
        query = rotate_append(qkv, attention.linear_qkv.bias, norms, self.cos, self.sin, positions_B, table, keys, values)
        return paged_decode(query, keys, values, table, lengths_B, self.scale).flatten(1)

    def _project(self, x: torch.Tensor, module: Any) -> torch.Tensor:
        x = F.linear(x, module.weight)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x
