"""Forward passes over paged pools in as few kernels as the layers allow: a decode step of eight and two products a layer,
and prompts packed one after the other.

The same parameters and the same arithmetic as :class:`rl3d.generation.lean.LeanBody`. Nothing in a decode step waits for
the host and no address changes between steps, so it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from rl3d.generation import lean
from rl3d.generation.context import GenerationContext
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
        if not alone:
            return self._layers(x, lambda index, attention, qkv: self._attend(index, attention, qkv, positions_B, table,
                                                                              lengths_B))  # fmt: skip
        for index, layer in enumerate(layers):
            attention, mlp = layer.self_attention, layer.mlp
            before, between = layer.input_layernorm, layer.pre_mlp_layernorm
            qkv = norm_gemv(x, (before.weight, before.eps), attention.linear_qkv.weight)
            out = self._attend(index, attention, qkv, positions_B, table, lengths_B)
            x = gemv_add(out, attention.linear_proj.weight, x)
            hidden = norm_gemv(x, (between.weight, between.eps), mlp.linear_fc1.weight, glu=True)
            x = gemv_add(hidden, mlp.linear_fc2.weight, x)
        norm = model.decoder.final_layernorm
        return norm_gemv(x, (norm.weight, norm.eps), self._head(), dtype=torch.float32)

    def prefill(self, ids_T: torch.Tensor, rows_N: torch.Tensor, context: GenerationContext) -> torch.Tensor:
        """Logits [N, padded_vocab / tp], fp32, at the packed tokens ``rows_N`` of what ``context`` has planned."""

        def attend(index: int, attention: Any, qkv: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.pools(index)
            kept = qkv.new_empty(2, len(qkv), *keys.shape[2:])
            query = self._append(index, attention, qkv, context.store_at, context.chunk_pages, context.chunk_of,
                                 (kept[0], kept[1]))  # fmt: skip
            return context.attend_stored(index, query, kept[0], kept[1], self.scale)

        return self._layers(self.model.embedding.word_embeddings(ids_T), attend, rows_N)

    def _layers(self, x: torch.Tensor, attend: Callable[[int, Any, torch.Tensor], torch.Tensor],
                rows_N: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """Logits [N, padded_vocab / tp], fp32, of embedded tokens [T, hidden] (at ``rows_N``, or all)."""
        layers = self.model.decoder.layers
        norm = layers[0].input_layernorm
        normed = rms_norm(x, norm.weight, norm.eps)
        for index, layer in enumerate(layers):
            attention, mlp, between = layer.self_attention, layer.mlp, layer.pre_mlp_layernorm
            out = attend(index, attention, F.linear(normed, attention.linear_qkv.weight))
            normed, x = add_rms_norm(self._project(out, attention.linear_proj), x, between.weight, between.eps)
            out = self._project(swiglu(F.linear(normed, mlp.linear_fc1.weight)), mlp.linear_fc2)
            last = index + 1 == len(layers)
            if last and rows_N is not None:
                out, x = out.index_select(0, rows_N), x.index_select(0, rows_N)
            after = self.model.decoder.final_layernorm if last else layers[index + 1].input_layernorm
            normed, x = add_rms_norm(out, x, after.weight, after.eps)
        return fp32_logits(normed, self._head())

    def _head(self) -> torch.Tensor:
        if self.model.share_embeddings_and_output_weights:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight

    def _attend(self, index: int, attention: Any, qkv: torch.Tensor, positions_B: torch.Tensor, table: torch.Tensor,
                lengths_B: torch.Tensor) -> torch.Tensor:  # fmt: skip
        query = self._append(index, attention, qkv, positions_B, table)
        return paged_decode(query, *self.cache.pools(index), table, lengths_B, self.scale).flatten(1)

    def _append(self, index: int, attention: Any, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor,
                rows: torch.Tensor | None = None,
                kept: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:  # fmt: skip
        norms = None
        if attention.q_layernorm is not None:
            norms = (attention.q_layernorm.weight, attention.k_layernorm.weight, attention.q_layernorm.eps)
        return rotate_append(qkv, attention.linear_qkv.bias, norms, self.cos, self.sin, positions, table,
                             *self.cache.pools(index), rows, kept)  # fmt: skip

    def _project(self, x: torch.Tensor, module: Any) -> torch.Tensor:
        x = F.linear(x, module.weight)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x
