"""Stage 0: every data-parallel rank holds everything; plain AdamW in fp32."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.engine.zero.base import Span, ZeroEngine


class ReplicatedEngine(ZeroEngine):
    """Gradients are averaged whole. DeepSpeed's own clipping counts tied and replicated parameters twice here, so norm
    and clipping are ours; its configuration must hold ``gradient_clipping: 0``."""

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        from deepspeed.utils import groups as deepspeed_groups

        yield
        self._sample_gradients()
        deepspeed_groups.mpu = self.engine.mpu  # a global of DeepSpeed's, which the engine started last has set
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    @torch.no_grad()
    def step(self, defer_gather: bool = False) -> tuple[float, bool]:
        """See :meth:`ZeroEngine.step`."""
        self.changes += 1
        norm = self._norm()
        if not torch.isfinite(norm):
            self.engine.zero_grad()
            return float(norm), False
        if self.settings.max_grad_norm > 0:
            factor = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for parameter in self.parameters:
                parameter.grad.mul_(factor)  # type: ignore[union-attr]
        self.engine.step()
        return float(norm), True

    def _norm(self) -> Tensor:
        """Of the whole model: a parameter that several ranks of a model-parallel group hold counts once."""
        total = torch.zeros((), device=self.device)
        for p in self.parameters:
            once = getattr(p, "tensor_model_parallel", False) or self.groups.tp_rank == 0
            if once and not getattr(p, "ds_pipe_replicated", False):
                total += p.grad.float().pow(2).sum()  # type: ignore[union-attr]
        dist.all_reduce(total, group=self.groups.mp)
        return total.sqrt()

    def flat_weights(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.flat_weights`."""
        return [p.data for p in self.parameters]

    def master_partitions(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.master_partitions`: the parameters themselves."""
        return list(self.parameters)

    def spans(self) -> list[list[Span]]:
        """See :meth:`ZeroEngine.spans`."""
        return [[Span(p, 0, p.numel(), 0)] for p in self.parameters]

    def _moments(self) -> Any:
        return self.optimizer

    def _weights_from_masters(self) -> None:
        pass
