"""Stages 1 and 2: whole weights on every rank; master weights, moments and (stage 2) gradients are partitioned.

Two optimisers of DeepSpeed: ``DeepSpeedZeroOptimizer``, and at stage 1 in bf16 without offload ``BF16_Optimizer``. Both
accumulate gradients in fp32.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rl3d.engine.zero.base import MicroBatchReduction, Span, ZeroEngine


class WholeGradientsEngine(ZeroEngine):
    """Gradients accumulate whole and are reduced once for each step: stage 1, and stage 2 with pipeline stages."""

    can_defer = True

    @property
    def _is_bf16_optimizer(self) -> bool:
        return hasattr(self.optimizer, "bf16_groups_flat")

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """See :meth:`ZeroEngine.accumulating`."""
        if self.bf16:
            yield
            self._sample_gradients()
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.allreduce_gradients()
        else:
            with self.engine.coalesce_grad_reduction():
                yield
                self._sample_gradients()
        self._sample_gradients()

    def step(self, defer_gather: bool = False) -> tuple[float, bool]:
        """See :meth:`ZeroEngine.step`."""
        defer_gather &= self.groups.dp_size > 1
        with self._without_gather() if defer_gather else contextlib.nullcontext():
            norm, stepped = super().step()
        self.gather_pending = defer_gather and stepped
        if not stepped and not self._is_bf16_optimizer:
            # with offload DeepSpeed keeps the gradients of a step that it skips, and would add the next ones to them
            self.optimizer.averaged_gradients.clear()
        return norm, stepped

    @contextlib.contextmanager
    def _without_gather(self) -> Iterator[None]:
        """DeepSpeed's step without its last act, the all-gather; this rank's partition is updated all the same."""
        module = sys.modules[type(self.optimizer).__module__]
        gather = module.all_gather_dp_groups  # type: ignore[attr-defined]
        module.all_gather_dp_groups = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.all_gather_dp_groups = gather  # type: ignore[attr-defined]

    def complete_weights(self) -> int:
        """See :meth:`ZeroEngine.complete_weights`."""
        if not self.gather_pending:
            return 0
        received = 0
        for flat, parts in zip(self.flat_weights(), self._partitions(), strict=True):
            own = parts[self.groups.dp_rank]
            dist.all_gather_into_tensor(flat.data, own.data.clone(), group=self.groups.dp)
            received += (flat.numel() - own.numel()) * flat.element_size()
        self.gather_pending = False
        return received

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """See :meth:`ZeroEngine.gradient`."""
        for name in ("_hp_grad", "grad_accum"):  # fp32 accumulators beside bf16 parameters
            grad = getattr(parameter, name, None)
            if grad is not None:
                return grad
        return parameter.grad

    def _gradient_storage(self) -> Iterable[Tensor | None]:
        for p in self.parameters:
            yield from (p.grad, getattr(p, "_hp_grad", None), getattr(p, "grad_accum", None))
        if not self._is_bf16_optimizer:
            yield from _reduction_storage(self.optimizer)

    # ---- what is where

    def flat_weights(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.flat_weights`."""
        return list(self.optimizer.bf16_groups_flat if self._is_bf16_optimizer else self.optimizer.bit16_groups_flat)

    def master_partitions(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.master_partitions`: one flat tensor for each parameter group."""
        if self._is_bf16_optimizer:
            return list(self.optimizer.fp32_groups_flat_partition)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def spans(self) -> list[list[Span]]:
        """See :meth:`ZeroEngine.spans`: this rank's slice of the flat buffer that the parameters are views of."""
        out: list[list[Span]] = []
        for master, flat in zip(self.master_partitions(), self.flat_weights(), strict=True):
            low, size, begin = self.groups.dp_rank * master.numel(), master.numel(), flat.data_ptr()
            out.append([])
            for parameter in self.parameters:
                first, rest = divmod(parameter.data_ptr() - begin, flat.element_size())
                if rest or not 0 <= first < flat.numel():
                    continue  # of another group
                start, stop = (min(max(edge - first, 0), parameter.numel()) for edge in (low, low + size))
                if start < stop:
                    out[-1].append(Span(parameter, start, stop, first + start - low))
        return out

    def _partitions(self) -> list[list[Tensor]]:
        """Views of :meth:`flat_weights`, one for each data-parallel rank."""
        optimizer = self.optimizer
        bf16 = self._is_bf16_optimizer
        return list(optimizer.bf16_partitioned_groups if bf16 else optimizer.parallel_partitioned_bit16_groups)

    def _weights_from_masters(self) -> None:
        for master, parts in zip(self.master_partitions(), self._partitions(), strict=True):
            parts[self.groups.dp_rank].data.copy_(master.data)
        self.gather_pending = self.groups.dp_size > 1
        self.complete_weights()


class ScatteredGradientsEngine(MicroBatchReduction, WholeGradientsEngine):
    """Stage 2 without pipeline stages: gradients go into this rank's fp32 partition, a bucket at a time."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # DeepSpeed accumulates into one flat partition in mixed precision only, otherwise into copies of all parameters
        # that touch the partition; the flat one serves fp32 as well
        self.optimizer._use_compact_grad_partition_buffer = lambda group_index: True


def _reduction_storage(optimizer: Any) -> Iterator[Tensor | None]:
    """Buckets and partitions in which a ``DeepSpeedZeroOptimizer`` holds gradients."""
    for bucket in optimizer.ipg_buckets.values():
        yield from bucket.buffer
    yield optimizer.grads_in_partition
    for held in (*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()):
        yield from held or ()
    yield from (p.grad for p in optimizer.single_partition_of_fp32_groups)
