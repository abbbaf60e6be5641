"""The training engine: a megatron-core model under DeepSpeed ZeRO that takes one optimiser step at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.forward import LossFunction, Pipeline
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.zero import AdamSettings, ZeroEngine
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
    """

    def __init__(self, model: Any, arch: Architecture, groups: ModelGroups, *, stage: int, settings: AdamSettings,
                 deepspeed: dict[str, Any] | None = None, logprob_chunk: int = 1024):  # fmt: skip
        self.model, self.arch, self.groups = model, arch, groups
        self._tied_copy = arch.tied and groups.pp_size > 1 and (groups.is_first_stage or groups.is_last_stage)
        if self._tied_copy and groups.is_last_stage:
            # both ends hold the tied embedding; the gradient norm must count it once
            model.shared_embedding_or_output_weight().ds_pipe_replicated = True
        self.zero = ZeroEngine(model, groups, stage, settings, deepspeed)
        self.pipeline = Pipeline(model, groups, arch.vocab_size, logprob_chunk)
        model.config.finalize_model_grads_func = self._finalize

    @property
    def weights(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's shard, as the forward pass reads it."""
        return {name: p.data for name, p in canonical_parameters(self.model, self.arch, self.groups).items()}

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`Pipeline.logprobs`."""
        return self.pipeline.logprobs(batches, temperature)

    def train_step(self, batches: Sequence[MicroBatch], loss: LossFunction, temperature: float) -> StepResult:
        """Forward and backward over ``batches``, then one optimiser step. Collective over the whole layout.

        ``loss`` returns this rank's share of a loss that is *summed* over micro-batches and data-parallel ranks: its
        weights already carry the normalisation over the global batch. Data-parallel ranks may have different numbers
        of micro-batches, but each needs at least one.

        Raises:
            ValueError: no micro-batch.
        """
        if not batches:
            raise ValueError("a training step needs at least one micro-batch on every data-parallel rank, got none")
        scale = self.groups.dp_size  # DeepSpeed averages over data parallelism

        def scaled(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
            value, collected = loss(logprobs, entropy, batch)
            return value * scale, collected

        self.model.train()
        with self.zero.accumulating():
            collected = self.pipeline.run(batches, scaled, temperature, forward_only=False)
        norm, stepped = self.zero.step()
        return StepResult(norm, stepped, collected)

    @torch.no_grad()
    def _finalize(self, chunks: Any, num_tokens: Any = None, **_: Any) -> None:
        """Called by megatron-core's schedule after the last backward pass, before ZeRO's reduction over dp.

        What ``megatron.core.distributed.finalize_model_grads`` does besides that reduction: the two copies of a tied
        embedding add up their gradients, so that they stay one parameter.
        """
        if self._tied_copy:
            grad = self.zero.gradient(self.model.shared_embedding_or_output_weight())
            assert grad is not None
            dist.all_reduce(grad, group=self.groups.embd)
