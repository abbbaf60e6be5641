"""The forward pass behind the generator: token ids in, this rank's slice of the logits out."""

from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel

from rl3d.generation.attention import CachedSelfAttention
from rl3d.generation.context import GenerationContext
from rl3d.kernels import fp32_logits

CPU_MIN_ROWS = 16
"""On a CPU, fp32 products of fewer rows take other kernels and differ in the last bit (MKL, AVX-512, measured for
2 to 1,600 rows at nine shapes): batches are padded to this, which costs next to nothing because the weights' bytes
decide the time."""


class Body(Protocol):
    """One forward pass under the plan of a context.

    ``decode_rows``: rows to which a decode batch must be padded for results that do not depend on its size.
    """

    decode_rows: int

    def forward(self, ids_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        """Logits [N, padded_vocab / tp] at the packed tokens ``rows_N`` (all of ``ids_T`` when ``None``)."""
        ...


class MegatronBody:
    """megatron-core's own modules, read-only: weights replaced in place are seen by the next call.

    The model must be a whole one (first and last stage), built with :class:`CachedSelfAttention`.
    """

    def __init__(self, model: GPTModel, context: GenerationContext) -> None:
        attention = model.decoder.layers[0].self_attention
        if not isinstance(attention, CachedSelfAttention):
            raise ValueError(
                f"the model's attention is {type(attention).__name__}, expected CachedSelfAttention; "
                f"build it with build_model(..., mode='generate', self_attention=CachedSelfAttention)"
            )
        self.model, self.context = model, context
        self.decode_rows = CPU_MIN_ROWS if context.cache.device.type == "cpu" else 1

    def forward(self, ids_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        def last_logits(*, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Any:
            hidden = hidden_states if rows_N is None else hidden_states.index_select(0, rows_N)
            return fp32_logits(hidden[:, 0], output_layer.weight if output_weight is None else output_weight)

        # The output processor keeps the logits of unneeded positions from being computed and the vocabulary sharded;
        # megatron-core's own inference mode would gather the whole vocabulary on every rank.
        return self.model(
            ids_T[None],
            self.context.positions[None],
            None,
            inference_context=self.context,
            output_processor=last_logits,
        )


def make_body(model: GPTModel, context: GenerationContext, tp_group: Any, kind: str = "auto") -> Body:
    """The forward pass to use: ``"lean"``, ``"megatron"``, or ``"auto"``, which is lean where it knows the model.

    Raises:
        ValueError: ``"lean"`` was asked for and cannot compute this model; the message says why.
    """
    from rl3d.generation.lean import LeanBody, reason_against

    if kind not in ("auto", "lean", "megatron"):
        raise ValueError(f"body {kind!r}: expected 'auto', 'lean' or 'megatron'")
    reason = reason_against(model, 1 if tp_group is None else tp_group.size())
    if kind == "lean" and reason:
        raise ValueError(f"body 'lean' cannot compute this model: {reason}; use 'auto' or 'megatron'")
    if kind == "megatron" or reason:
        return MegatronBody(model, context)
    return LeanBody(model, context, tp_group)
