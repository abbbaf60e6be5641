"""One decoder layer as megatron-core's specification, with rl3d's modules in it."""

from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from rl3d.distributed.groups import ModelGroups
from rl3d.models.architecture import Architecture
from rl3d.models.layers import HeadNorm, PackedAttention, ProjectionNorm, RMSNorm, RowParallelNormed, SwiGLU


def norm_of(arch: Architecture) -> Any:
    """Builder of the model's norms over the hidden size."""
    return partial(RMSNorm, late_rounding=True) if arch.post_norm else RMSNorm


def layer_spec(arch: Architecture, groups: ModelGroups, self_attention: type | None = None) -> ModuleSpec:
    """The specification of each layer of ``arch``.

    Args:
        self_attention: class to use for self attention in place of megatron-core's.
    """
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts, attention = layer.submodules, layer.submodules.self_attention
    if self_attention is not None:
        attention.module = self_attention
    attention.submodules.core_attention = PackedAttention
    attention.submodules.q_layernorm, attention.submodules.k_layernorm = _qk_norms(arch, groups)
    row_parallel = RowParallelLinear
    if arch.post_norm:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        row_parallel = attention.submodules.linear_proj = RowParallelNormed
    else:
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=row_parallel, activation_func=SwiGLU)
    parts.mlp = partial(MLP.as_mlp_submodule, submodules=mlp)
    return layer


def _qk_norms(arch: Architecture, groups: ModelGroups) -> tuple[Any, Any]:
    if arch.qk_norm == "head":
        return HeadNorm, HeadNorm
    if arch.qk_norm == "projection":
        q, k = (partial(ProjectionNorm, heads=n, group=groups.tp) for n in (arch.num_heads, arch.num_kv_heads))
        return q, k
    return IdentityOp, IdentityOp
