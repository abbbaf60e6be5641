"""Architecture -> megatron-core ``GPTModel`` on explicit process groups, without Transformer Engine or Apex."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import _MODEL_PARALLEL_RNG_TRACKER_NAME
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.layout import cut_problem, stage_chunks, tp_sizes
from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError
from rl3d.models.rope import scaled_frequencies
from rl3d.models.spec import layer_spec, norm_of
from rl3d.models.value_head import put_value_head


@dataclass
class RowBoundaries(PackedSeqParams):
    """Sequences end to end in one row, as megatron-core hands it to attention.

    megatron-core's own packed format rotates and cuts sequence by sequence in Python; here the row stays an ordinary
    [T, 1, ...] tensor, and core attention reads the boundaries and the rotation.

    ``rotary``: cosines and sines [T, D / 2], fp32, of each token's position: computed once for all layers.
    """

    lengths: tuple[int, ...] = ()
    rotary: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, lengths: "tuple[int, ...] | list[int]", device: torch.device) -> "RowBoundaries":
        """Boundaries of ``lengths`` sequences, on ``device``."""
        cu = torch.tensor([0, *torch.tensor(list(lengths)).cumsum(0).tolist()], dtype=torch.int32, device=device)
        longest = max(lengths)
        return cls(qkv_format="sbhd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest,
                   lengths=tuple(lengths))  # fmt: skip


class PackedGPTModel(GPTModel):
    """GPTModel whose rotary embedding follows ``position_ids`` in packed rows, applied by core attention."""

    rotary_amplitude = 1.0
    """What cosines and sines are multiplied by (yarn)."""

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, decoder_input: Tensor | None = None,
                    inference_context: Any = None, packed_seq_params: Any = None, padding_mask: Any = None):  # fmt: skip
        out = super()._preprocess(input_ids, position_ids, decoder_input, inference_context, packed_seq_params,
                                  padding_mask)  # fmt: skip
        if packed_seq_params is None:
            return out
        angles_TD = position_ids[0].float()[:, None] * self.rotary_pos_emb.inv_freq.to(position_ids.device)
        packed_seq_params.rotary = tuple(f(angles_TD) * self.rotary_amplitude for f in (torch.cos, torch.sin))
        return (out[0], None, *out[2:])


class InterleavedStage(torch.nn.ModuleList):
    """The chunks of one interleaved pipeline stage as one module; chunk ``c`` is virtual stage ``c * pp + stage``."""

    def __init__(self, chunks: Sequence[PackedGPTModel]):
        super().__init__(chunks)
        self.config = chunks[0].config

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        """The embedding on the first stage, the output projection on the last."""
        chunk: Any = next(chunk for chunk in model_chunks(self) if chunk.pre_process or chunk.post_process)
        return chunk.shared_embedding_or_output_weight()


def model_chunks(model: torch.nn.Module) -> list[Any]:
    """The ``GPTModel`` chunks of what :func:`build_model` gave, in order; one unless stages are interleaved."""
    return list(model) if isinstance(model, InterleavedStage) else [model]


def check_tensor_parallel(arch: Architecture, tp: int, key: str) -> None:
    """Raise :class:`UnsupportedModelError` when ``tp`` does not cut the heads or the MLP; ``key`` names the setting."""
    sizes = (arch.num_heads, arch.num_kv_heads, arch.ffn_size)
    if problem := cut_problem(tp, *sizes):
        raise UnsupportedModelError(f"{key}: {problem}; choose tp among {list(tp_sizes(*sizes))}")


def transformer_config(arch: Architecture, groups: ModelGroups, dtype: torch.dtype, device: torch.device,
                       **overrides: Any) -> TransformerConfig:  # fmt: skip
    """megatron-core's configuration. ``overrides`` are the user's ``megatron:`` section."""
    settings: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn_size,
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "virtual_pipeline_model_parallel_size": groups.vpp if groups.vpp > 1 else None,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # every weight is loaded
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # its hook for a module between the projections: our SwiGLU
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm != "none",
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.rms_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "variable_seq_lengths": True,  # packed rows differ in length from one micro-batch to the next
        "moe_token_dispatcher_type": "alltoall",  # the default refuses variable lengths, MoE or not
        "cuda_graph_modules": [],
        # one direction a message: with two stages, batched messages of both directions would be told apart by nothing
        "overlap_p2p_comm": groups.vpp > 1,
        "batch_p2p_comm": groups.vpp == 1,
        # fused kernels of Apex and Transformer Engine, which rl3d does without
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**{**settings, **overrides})


def build_model(arch: Architecture, groups: ModelGroups, *, padded_vocab: int, dtype: torch.dtype,
                device: torch.device, mode: str = "train", self_attention: type | None = None,
                use_flash_attention: bool = True, sequence_parallel: bool = False, recompute: str = "none",
                **overrides: Any) -> PackedGPTModel | InterleavedStage:  # fmt: skip
    """This rank's part of the model, with unset weights. Collective over ``groups`` when the embedding is tied.

    Args:
        mode: ``"train"`` (gradients on) or ``"generate"`` (evaluation mode, gradients off).
        self_attention: class to use for self attention in place of megatron-core's; the generation engine's hook.
        use_flash_attention: take the variable-length flash kernel where there is one.
        sequence_parallel: outside attention and MLP each tensor-parallel rank holds a part of the sequence. Rows must
            then divide by tp. In ``"train"`` mode only.
        recompute: activations that the backward pass computes again: ``"none"``, ``"selective"`` (core attention) or
            ``"full"`` (each layer from its input). In ``"train"`` mode only.
        overrides: megatron-core settings of the user.

    Raises:
        UnsupportedModelError: heads or MLP not divisible by tp.
        LayoutError: fewer layers than (virtual) stages.
    """
    check_tensor_parallel(arch, groups.tp_size, "layout.train" if mode == "train" else "layout.gen")
    chunks = stage_chunks(arch.num_layers, groups.pp_size, groups.vpp)[groups.pp_rank]
    if mode == "train":
        overrides = {**_activation_memory(sequence_parallel, recompute), **overrides}
    config = transformer_config(arch, groups, dtype, device, **overrides)
    config.use_flash_attention = use_flash_attention  # read by PackedAttention
    layer, scaled = layer_spec(arch, groups, self_attention), scaled_frequencies(arch, device)

    def build(chunk: int) -> PackedGPTModel:
        layers = chunks[chunk]
        part = PackedGPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=norm_of(arch)),
            vocab_size=groups.tp_size if arch.value_head else padded_vocab,
            max_sequence_length=arch.max_positions,
            pre_process=groups.is_first_stage and chunk == 0,
            post_process=groups.is_last_stage and chunk == groups.vpp - 1,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            pg_collection=groups.pg_collection(),
            vp_stage=chunk if groups.vpp > 1 else None,
        )
        if arch.value_head:
            put_value_head(part, arch, padded_vocab)
        part = part.to(device)
        for index, module in zip(layers, part.decoder.layers, strict=True):
            for inner in module.modules():  # megatron-core numbers layers as if every stage held the same number
                if hasattr(inner, "layer_number"):
                    inner.layer_number = index + 1
        if scaled is not None:
            part.rotary_pos_emb.inv_freq, part.rotary_amplitude = scaled
            for module in part.decoder.layers:  # outside packed rows it is megatron-core's attention that multiplies
                module.self_attention._yarn_concentration_factor = part.rotary_amplitude
        return part

    model = build(0) if groups.vpp == 1 else InterleavedStage([build(chunk) for chunk in range(groups.vpp)])
    if mode == "generate":
        model.eval().requires_grad_(False)
    return model


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _activation_memory(sequence_parallel: bool, recompute: str) -> dict[str, Any]:
    """megatron-core's settings for what is kept of the forward pass."""
    if recompute not in _RECOMPUTE:
        raise ValueError(f"recompute = {recompute!r}: expected one of {', '.join(_RECOMPUTE)}")
    if sequence_parallel:
        # what megatron-core makes with its global groups, and wants without them as well: a buffer to gather into, and a
        # random state for dropout that differs between ranks (there is no dropout here)
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        tracker = get_cuda_rng_tracker()
        if _MODEL_PARALLEL_RNG_TRACKER_NAME not in tracker.get_states():
            tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, 0)
    return {"sequence_parallel": sequence_parallel, **_RECOMPUTE[recompute]}


def canonical_parameters(model: torch.nn.Module, arch: Architecture, groups: ModelGroups) -> dict[str, torch.nn.Parameter]:
    """Canonical (global layer index) name -> parameter of this rank's part of the model."""
    stage = stage_chunks(arch.num_layers, groups.pp_size, groups.vpp)[groups.pp_rank]
    out = {}
    for chunk, layers in zip(model_chunks(model), stage, strict=True):
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                head, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{layers[int(head)]}.{rest}"
            elif arch.value_head and name.startswith("output_layer."):
                name = name.replace("output_layer", "value_head")
            elif name == "output_layer.weight" and arch.tied:
                name = "embedding.word_embeddings.weight"
            out[name] = parameter
    return out
