"""megatron-core's own modules for any family that rl3d converts, to compute from what the converter wrote.

Configured from rl3d's reading of config.json; frequencies of the rotary embedding are transformers'. What megatron-core
has no module for is put into its layer specification here, in plain torch: attention with head sizes that differ, windows,
soft caps or a rotary embedding for each kind of layer; norms by 1 + weight and after a projection.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from rl3d.models import Architecture


class Norm(nn.Module):
    """RMS norm in fp32, times the weight or one plus the weight."""

    def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = 1e-6, offset: float = 0.0, **_: Any):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(hidden_size)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight + self.offset)


class NormedRowParallel(RowParallelLinear):
    """A projection whose summed output is normed: Megatron-Bridge's ``post_layernorm``."""

    def __init__(self, input_size: int, output_size: int, *args: Any, config: Any, **kwargs: Any):
        super().__init__(input_size, output_size, *args, config=config, **kwargs)
        self.post_layernorm = Norm(config, output_size, config.layernorm_epsilon, offset=1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return self.post_layernorm(out), bias


class WholeQueries(MLASelfAttention):
    """megatron-core takes Transformer Engine's projection, norm inside, for queries without a latent; here it is plain."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": ColumnParallelLinear}


def _attention(arch: Architecture, rotary: Any) -> type:
    """A core attention class: scores [query, key] scaled, capped, masked; softmax in fp32."""

    class Attention(nn.Module):
        def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any):
            super().__init__()
            self.layer = layer_number - 1
            self.scale = softmax_scale or arch.attention_scale or arch.head_dim**-0.5
            if arch.latent is None:  # over the whole head; latent attention scales its rotated part itself
                self.scale *= rotary.factor(self.layer) ** 2

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            """[T, B, heads, size] -> [T, B, heads x size]."""
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            if arch.local_rope is not None:
                q, k = rotary.rotate(q, self.layer), rotary.rotate(k, self.layer)
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            scores = q @ k.mT * self.scale
            if arch.attention_softcap:
                scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
            distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
            seen = distance >= 0
            if arch.windows and arch.windows[self.layer]:
                seen &= distance < arch.windows[self.layer]
            out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
            return out.permute(2, 0, 1, 3).flatten(2)

    return Attention


class Rotary:
    """Frequencies and factors that transformers' model computed."""

    def __init__(self, hf: Any, arch: Architecture):
        self._module, self._windows = hf.model.rotary_emb, arch.windows

    def frequencies(self, layer: int = 0) -> Tensor:
        return getattr(self._module, self._kind(layer) + "inv_freq")

    def factor(self, layer: int) -> float:
        return float(getattr(self._module, self._kind(layer) + "attention_scaling"))

    def _kind(self, layer: int) -> str:
        if hasattr(self._module, "inv_freq"):
            return ""
        return "sliding_attention_" if self._windows[layer] else "full_attention_"

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """[..., T, size]: halves as real and imaginary parts."""
        angles = torch.outer(torch.arange(x.shape[-2]).float(), self.frequencies(layer))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def build(arch: Architecture, hf: Any, padded: int, tp: int = 1, pp: int = 1, ep: int = 1) -> Any:
    """The stage of this rank, under the global parallel_state of this layout. ``hf``: transformers' model."""
    config, rotary = _config(arch, tp, pp, ep), Rotary(hf, arch)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    norm = partial(Norm, offset=1.0 if arch.zero_centred_norms else 0.0)
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = _attention(arch, rotary)
        if arch.latent is not None and arch.latent.q_rank is None:
            attention.q_layernorm = IdentityOp
            parts.self_attention.module = WholeQueries
        if arch.zero_centred_norms:
            parts.input_layernorm = parts.pre_mlp_layernorm = norm
            if arch.qk_norm == "head":
                attention.q_layernorm = attention.k_layernorm = norm
        if arch.sandwich_norms:
            attention.linear_proj = NormedRowParallel
            mlp = MLPSubmodules(linear_fc1=parts.mlp.keywords["submodules"].linear_fc1, linear_fc2=NormedRowParallel)
            parts.mlp = partial(MLP.as_mlp_submodule, submodules=mlp)
    if arch.zero_centred_norms:
        block.layer_norm = norm
    stage = parallel_state.get_pipeline_model_parallel_rank()
    rope = {"position_embedding_type": "none"} if arch.local_rope else {"position_embedding_type": "rope"}
    model = GPTModel(
        config, block, vocab_size=padded, max_sequence_length=256, pre_process=stage == 0, post_process=stage == pp - 1,
        share_embeddings_and_output_weights=arch.tied, rotary_base=int(arch.rope_theta), **rope,
    ).eval()  # fmt: skip
    if not arch.local_rope and arch.latent is None:
        model.rotary_pos_emb.inv_freq = rotary.frequencies() * 1.0  # a plain tensor, as it was
    if model.pre_process and arch.embedding_scale != 1.0:
        model.embedding.register_forward_hook(lambda module, given, out: out * arch.embedding_scale)
    return model


def _config(arch: Architecture, tp: int, pp: int, ep: int) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=arch.num_layers, hidden_size=arch.hidden_size, ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads, num_query_groups=arch.num_kv_heads, kv_channels=arch.head_dim,
        normalization="RMSNorm", layernorm_epsilon=arch.rms_eps, gated_linear_unit=True, add_bias_linear=False,
        activation_func=F.silu if arch.activation == "silu" else partial(F.gelu, approximate="tanh"),
        add_qkv_bias=arch.qkv_bias, qk_layernorm=arch.qk_norm == "head", hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, persist_layer_norm=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
    )  # fmt: skip
    if (experts := arch.experts) is not None:
        settings |= dict(
            num_moe_experts=experts.count, moe_router_topk=experts.active, moe_ffn_hidden_size=experts.ffn_size,
            moe_shared_expert_intermediate_size=experts.shared_ffn or None, moe_shared_expert_gate=experts.shared_gate,
            moe_layer_freq=1 if all(experts.sparse) else [int(s) for s in experts.sparse],
            moe_router_score_function=experts.score, moe_router_enable_expert_bias=experts.bias,
            moe_router_pre_softmax=experts.score == "softmax" and not experts.normalised,
            moe_router_topk_scaling_factor=experts.scaling if experts.scaling != 1.0 else None,
            moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
        )  # fmt: skip
        if experts.groups > 1:
            settings |= dict(moe_router_num_groups=experts.groups, moe_router_group_topk=experts.active_groups)
    if (latent := arch.latent) is None:
        return TransformerConfig(**settings)
    scaling = dict(arch.rope_scaling)
    if scaling:
        settings |= dict(
            rope_type="yarn", rotary_scaling_factor=scaling["factor"], mscale=scaling["mscale"],
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
            mscale_all_dim=scaling["mscale_all_dim"],
        )  # fmt: skip
    else:
        settings |= dict(rope_type="rope")
    settings.pop("num_query_groups")
    return MLATransformerConfig(
        **settings | dict(qk_layernorm=True, kv_channels=arch.head_dim), q_lora_rank=latent.q_rank,  # type: ignore[arg-type]
        kv_lora_rank=latent.kv_rank, qk_head_dim=latent.nope_dim, qk_pos_emb_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim, rotary_base=arch.rope_theta,
    )  # fmt: skip
