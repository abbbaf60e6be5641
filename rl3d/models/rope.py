"""Rotary frequencies by transformers' own formulas: megatron-core hard-codes Llama 3.1's constants."""

import torch
from torch import Tensor

from rl3d.models.architecture import Architecture


def scaled_frequencies(arch: Architecture, device: torch.device) -> tuple[Tensor, float] | None:
    """Scaled inverse frequencies [head_dim / 2] in fp32, and the factor by which cosines and sines are multiplied.

    ``None`` when the plain ``theta ** (-2i / d)`` are right.
    """
    if not arch.rope_scaling:
        return None
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**dict(arch.rope_scaling), "rope_theta": arch.rope_theta}
    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_positions,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)
    return frequencies.float(), float(factor)
