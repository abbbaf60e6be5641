"""The training engine: a megatron-core model under DeepSpeed ZeRO that takes one optimiser step at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.forward import LossFunction, Pipeline
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.zero import AdamSettings, build_zero
from rl3d.models import Architecture
from rl3d.models.build import canonical_parameters


@dataclass(frozen=True)
class StepResult:
    """One optimiser step: gradient norm before clipping, whether the step was taken, what the loss collected."""

    grad_norm: float
    stepped: bool
    collected: list[dict[str, Any]]


class TrainingEngine:
    """Forward passes and optimiser steps of one model in its TP x PP x DP layout.

    Args:
        model: this rank's part with loaded weights (``rl3d.models.build.build_model``).
        arch, groups: what it is and where it lives.
        stage: ZeRO stage.
        settings: optimiser.
        deepspeed: user's settings for DeepSpeed.
        logprob_chunk: tokens whose fp32 logits exist at a time.
        offload: what lives in host memory; see :func:`rl3d.engine.zero.build_zero`.
        defer_gather: leave out the all-gather of ZeRO stages 1 and 2 after the last step of a phase.

    Raises:
        ValueError: ``defer_gather`` at a stage that gathers nothing.
    """

    def __init__(self, model: Any, arch: Architecture, groups: ModelGroups, *, stage: int, settings: AdamSettings,
                 deepspeed: dict[str, Any] | None = None, logprob_chunk: int = 1024, offload: str = "none",
                 defer_gather: bool = False):  # fmt: skip
        self.model, self.arch, self.groups = model, arch, groups
        self._tied_copy = arch.tied and groups.pp_size > 1 and (groups.is_first_stage or groups.is_last_stage)
        if self._tied_copy and groups.is_last_stage:
            # both ends hold the tied embedding; the gradient norm must count it once
            model.shared_embedding_or_output_weight().ds_pipe_replicated = True
        self.zero = build_zero(model, groups, stage, settings, deepspeed, offload)
        if defer_gather and not self.zero.can_defer:
            raise ValueError(f"defer_gather: zero{stage} gathers nothing after a step; use it with zero1 or zero2")
        self.defer_gather = defer_gather
        self.pipeline = Pipeline(model, arch, groups, logprob_chunk)
        self.pipeline.training_forward = self.zero.forward
        model.config.finalize_model_grads_func = self._finalize

    @property
    def weights(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's shard, in memory that stays where it is: the tensor-parallel shard as the forward
        pass reads it, or at ZeRO stage 3 this rank's flat part of it. Weights that rest on the host are copied. Collective
        over dp where a gather is pending."""
        self.zero.complete_weights()
        return self.local_weights

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """As :attr:`weights`, without communication: where ``zero.gather_pending``, only this rank's partition is new."""
        named = canonical_parameters(self.model, self.arch, self.groups)
        return {name: self.zero.shard(parameter).to(self.zero.device) for name, parameter in named.items()}

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`Pipeline.logprobs`. Collective over data parallelism at ZeRO stage 3."""
        self.zero.complete_weights()
        rows = self.pipeline.level(batches) if self.zero.shards_weights else batches
        return self.pipeline.logprobs(rows, temperature)[: len(batches)]

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """See :meth:`Pipeline.values`. Collective over data parallelism at ZeRO stage 3."""
        self.zero.complete_weights()
        rows = self.pipeline.level(batches) if self.zero.shards_weights else batches
        return self.pipeline.values(rows)[: len(batches)]

    def train_step(self, batches: Sequence[MicroBatch], loss: LossFunction, temperature: float = 1.0,
                   last: bool = False) -> StepResult:  # fmt: skip
        """Forward and backward over ``batches``, then one optimiser step. Collective over the whole layout.

        ``loss`` returns this rank's share of a loss that is *summed* over micro-batches and data-parallel ranks: its
        weights already carry the normalisation over the global batch. Data-parallel ranks may have different numbers
        of micro-batches, but each needs at least one. ``last``: no other step follows in this phase, so that with
        :attr:`defer_gather` the weights may stay in their partitions until somebody needs them whole.

        Raises:
            ValueError: no micro-batch.
        """
        if not batches:
            raise ValueError("a training step needs at least one micro-batch on every data-parallel rank, got none")
        scale = self.groups.dp_size  # DeepSpeed averages over data parallelism

        def scaled(*outputs: Any) -> tuple[Tensor, dict[str, Any]]:
            value, collected = loss(*outputs)
            return value * scale, collected

        rows = self.pipeline.level(batches) if self.zero.level else batches
        self.zero.complete_weights()
        self.model.train()
        with self.zero.accumulating():
            collected = self.pipeline.run(rows, scaled, temperature, forward_only=False)
        norm, stepped = self.zero.step(self.defer_gather and last)
        return StepResult(norm, stepped, collected[: len(batches)])

    def _finalize(self, chunks: Any, num_tokens: Any = None, **_: Any) -> None:
        """Called by megatron-core's schedule after the last backward pass, before ZeRO's reduction over dp: what
        ``megatron.core.distributed.finalize_model_grads`` does besides that reduction."""
        self.zero.finish_gradients(self.model.shared_embedding_or_output_weight() if self._tied_copy else None)
