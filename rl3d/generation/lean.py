"""A forward pass without megatron-core's module machinery, over the same parameters.

Decoding a token is a few dozen small products a layer; on a CPU the modules' Python costs as much as a third of them.
This body reads the parameters of the megatron-core modules, so weights replaced in place are seen, and computes what
they compute, term by term. It knows the plain decoder: RMSNorm before or after, rotary, grouped queries, query and key
norms, gated SiLU, no MoE; for anything else :class:`rl3d.generation.body.MegatronBody` runs the modules themselves.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from rl3d.generation.context import GenerationContext
from rl3d.kernels import fp32_logits, swiglu

_FEW_ROWS = 64  # up to here W @ x^T beats x @ W^T on a CPU, and its rows do not depend on how many there are


def reason_against(model: GPTModel, tp: int) -> str | None:
    """Why this body cannot compute ``model``; ``None`` when it can."""
    config = model.config
    expected = {
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "multi_latent_attention": False, "num_moe_experts": None, "qk_l2_norm": False, "mtp_num_layers": None,
        "fp32_residual_connection": False, "sequence_parallel": False, "use_mup": False,
        "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        if getattr(config, name, value) != value:
            return f"{name} = {getattr(config, name)!r}, expected {value!r}"
    if config.num_query_groups < tp:
        return f"{config.num_query_groups} key/value heads on {tp} ranks (the modules gather QKV)"
    if model.position_embedding_type != "rope":
        return f"position embedding {model.position_embedding_type!r}, expected 'rope'"
    return None


class LeanBody:
    """See the module. ``tp_group`` is ``None`` on one rank."""

    def __init__(self, model: GPTModel, context: GenerationContext, tp_group: dist.ProcessGroup | None) -> None:
        self.model, self.context, self.group = model, context, tp_group
        self.cpu = context.cache.device.type == "cpu"
        self.decode_rows = 2 if self.cpu else 1
        attention = model.decoder.layers[0].self_attention
        self.groups = attention.num_query_groups_per_partition
        self.head_dim = attention.hidden_size_per_attention_head
        self.scale = model.config.softmax_scale
        self.amplitude = attention._yarn_concentration_factor

    def forward(self, ids_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        """Logits [N, padded_vocab / tp] at the packed tokens ``rows_N`` (all when ``None``, a decode step)."""
        model = self.model
        linear = _few_rows_linear if self.cpu and rows_N is None and len(ids_T) <= _FEW_ROWS else F.linear
        x = model.embedding.word_embeddings(ids_T)
        rotary = model.rotary_pos_emb(self.context.max_sequence_length)
        for index, layer in enumerate(model.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            out = self._attention(index, attention, layer.input_layernorm(x), rotary, linear)
            x = x + self._project(out, attention.linear_proj, linear)
            gate_up = linear(layer.pre_mlp_layernorm(x), mlp.linear_fc1.weight)
            x = x + self._project(swiglu(gate_up), mlp.linear_fc2, linear)
        x = model.decoder.final_layernorm(x if rows_N is None else x.index_select(0, rows_N))
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        return linear(x, weight) if x.dtype == torch.float32 else fp32_logits(x, weight)

    def _attention(self, index: int, module: Any, x: torch.Tensor, rotary: torch.Tensor, linear: Any) -> torch.Tensor:
        qkv = linear(x, module.linear_qkv.weight)
        if module.linear_qkv.bias is not None:
            qkv = qkv + module.linear_qkv.bias
        # per key/value head: its query heads, its key, its value
        qkv = qkv.view(x.shape[0], self.groups, -1, self.head_dim)
        if module.q_layernorm is None:
            turned = self._rotate(qkv[:, :, :-1].flatten(1, 2), rotary).unflatten(1, (self.groups, -1))
            query, key = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1]
        else:
            query = self._rotate(module.q_layernorm(qkv[:, :, :-2].flatten(1, 2)), rotary)
            key = self._rotate(module.k_layernorm(qkv[:, :, -2]), rotary)
        return self.context.attend(index, query, key, qkv[:, :, -1], self.scale)

    def _rotate(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        return self.context.rotate(x, rotary, self.amplitude)

    def _project(self, x: torch.Tensor, module: Any, linear: Any) -> torch.Tensor:
        """A row-parallel projection, and its norm where it has one."""
        x = linear(x, module.weight)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        norm = getattr(module, "post_layernorm", None)
        return x if norm is None else norm(x)


def _few_rows_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()
