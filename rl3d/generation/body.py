"""The forward pass behind the generator: token ids in, this rank's slice of the logits out."""

from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel

from rl3d.generation.context import GenerationContext


class Body(Protocol):
    """One forward pass under the plan of a context."""

    def forward(self, ids_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        """Logits [N, padded_vocab / tp] at the packed tokens ``rows_N`` (all of ``ids_T`` when ``None``)."""
        ...


class MegatronBody:
    """megatron-core's own modules, read-only: weights replaced in place are seen by the next call.

    The model must be a whole one (first and last stage), built with :class:`CachedSelfAttention`.
    """

    def __init__(self, model: GPTModel, context: GenerationContext) -> None:
        self.model, self.context = model, context

    def forward(self, ids_T: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        def last_logits(*, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Any:
            hidden = hidden_states if rows_N is None else hidden_states.index_select(0, rows_N)
            logits, _bias = output_layer(hidden, weight=output_weight, runtime_gather_output=False)
            return self.model._scale_logits(logits)[:, 0]

        # The output processor keeps the logits of unneeded positions from being computed and the vocabulary sharded;
        # megatron-core's own inference mode would gather the whole vocabulary on every rank.
        return self.model(
            ids_T[None],
            self.context.positions[None],
            None,
            inference_context=self.context,
            output_processor=last_logits,
        )
