"""megatron-core's self-attention with our cache in the place of its flash-attention kernels.

megatron-core's own forward pass insists on the flash-attn package as soon as a dynamic context is given. This
subclass needs no patch of that: with a :class:`GenerationContext` it does the three steps itself (project, attend,
project) and without one it is the parent.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from rl3d.generation.context import GenerationContext


class CachedSelfAttention(SelfAttention):
    """Self-attention that reads and writes a :class:`GenerationContext`.

    Put it into a layer specification with ``spec.submodules.self_attention.module = CachedSelfAttention``; parameters
    and their names stay those of :class:`SelfAttention`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        for name, usual in (
            ("attention_output_gate", False),
            ("rotary_interleaved", False),
            ("window_size", None),
            ("no_rope_freq", None),
            ("multi_latent_attention", False),
        ):
            value = getattr(config, name, usual)
            if value != usual:
                raise ValueError(
                    f"the built-in generator does not know {name} = {value!r} (expected {usual!r}); "
                    f"generate such models with another engine"
                )

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any):
        """hidden_states [T, 1, hidden] -> ([T, 1, hidden], bias or None), as the parent returns it."""
        context = kwargs.get("inference_context")
        if not isinstance(context, GenerationContext):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query, key = query[:, 0], key[:, 0]
        rotary = kwargs.get("rotary_pos_emb")
        if rotary is not None:
            scale = self._yarn_concentration_factor
            query, key = context.rotate(query, rotary, scale), context.rotate(key, rotary, scale)
        out = context.attend(self.layer_number - 1, query, key, value[:, 0], self.config.softmax_scale)
        return self.linear_proj(out[:, None])
