"""What all ZeRO stages have in common: settings, DeepSpeed's start, the optimiser step, saving, counting gradients."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.mpu import ModelParallelUnit


@dataclass(frozen=True)
class AdamSettings:
    """AdamW hyper-parameters and the gradient norm to clip to (0: no clipping)."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter (of its tensor-parallel shard, flattened) from element ``at`` of a
    master partition on."""

    parameter: Parameter
    start: int
    stop: int
    at: int


class ZeroEngine(ABC):
    """A module under ZeRO: gradients in, one optimiser step out. :func:`rl3d.engine.zero.build_zero` chooses the class.

    Args:
        model: this rank's part of the model, weights loaded; its parameters become views of DeepSpeed's buffers.
        groups: where it lives.
        settings: AdamW and clipping.
        config: DeepSpeed's configuration.

    Attributes:
        level: data-parallel ranks must run the same number of micro-batches, as each communicates.
        shards_weights: between steps a rank holds flat parts of the weights; forward passes communicate.
        can_defer: the all-gather after a step may wait, see :meth:`step`.
        gather_pending: this rank's weights are new in its own partition only; :meth:`complete_weights` gathers the rest.
        changes: grows with every step and load: what is kept between steps differs from then on.
        peak_gradient_bytes: most bytes of gradients seen while :meth:`watch_gradients` is on.
    """

    level = False
    shards_weights = False
    can_defer = False

    def __init__(self, model: torch.nn.Module, groups: ModelGroups, settings: AdamSettings, config: dict[str, Any]):
        self.module, self.groups, self.settings = model, groups, settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.bf16 = self.parameters[0].dtype == torch.bfloat16
        self.gather_pending = False
        self.changes = 0
        self.peak_gradient_bytes = 0
        self._watching = False
        for parameter in self.parameters:  # before DeepSpeed adds its own, which take the gradient away
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
        optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
            fused=True,
        )  # fmt: skip
        self.engine = start_deepspeed(model, groups, config, optimizer)
        self.optimizer: Any = self.engine.optimizer

    # ---- one step

    @property
    def forward(self) -> Callable[..., Any]:
        """What to call for a forward pass that will be followed by a backward pass."""
        return self.module

    @abstractmethod
    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Around all backward passes of one step; gradients are averaged over data parallelism when it is left."""

    def finish_gradients(self, shared_embedding: Parameter | None) -> None:
        """After the last backward pass, before the reduction over data parallelism: what is not a sum over dp.

        Some copies on tensor-parallel ranks have parts of their gradient (:meth:`_is_partial`); the two copies of a tied
        embedding (``shared_embedding``: this rank's) each saw one use of it.
        """
        with torch.no_grad():
            partial = [g for p in self.parameters if self._is_partial(p) and (g := self.gradient(p)) is not None]
            if partial:
                flat = torch.cat([g.flatten() for g in partial])
                dist.all_reduce(flat, group=self.groups.tp)
                for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
                    grad.copy_(total.view_as(grad))
            if shared_embedding is not None:
                tied = self.gradient(shared_embedding)
                assert tied is not None
                dist.all_reduce(tied, group=self.groups.embd)

    def _is_partial(self, parameter: Parameter) -> bool:
        """Whether the copies on the tensor-parallel ranks get parts of the gradient: norms under sequence parallelism, and
        weights that modules mark with ``sum_gradient_over_tp`` (norms of the heads of a rank)."""
        marks = ("sequence_parallel", "sum_gradient_over_tp")
        return self.groups.tp_size > 1 and any(getattr(parameter, mark, False) for mark in marks)

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """This rank's accumulated gradient before the reduction, wherever the optimiser keeps it."""
        return parameter.grad

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, defer_gather: bool = False) -> tuple[float, bool]:
        """Clip and update. Returns the gradient norm before clipping and whether the step was taken.

        A norm that is not finite skips the step on all ranks: weights and moments stay as they were.

        Args:
            defer_gather: where :attr:`can_defer`, leave out the all-gather of the updated partitions;
                :attr:`gather_pending` says that it was.
        """
        self.changes += 1
        self.engine.step()
        skipped = bool(getattr(self.optimizer, "overflow", False))
        norm = self.engine.get_global_grad_norm()
        return (float("nan") if norm is None else float(norm)), not skipped

    # ---- what is where

    def shard(self, parameter: Parameter) -> Tensor:
        """What this rank holds of the weights of a parameter between steps: all of it, or a flat part (stage 3)."""
        return parameter.data

    def complete_weights(self) -> int:
        """Gather what a step left out; the bytes received. Collective over dp, like the step it belongs to."""
        return 0

    def weights_rebuilt(self) -> None:
        """The weights are complete again: somebody has written all of them."""
        self.gather_pending = False

    @property
    def rests_on_host(self) -> bool:
        """Whether the weights are in host memory between passes."""
        return False

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """The buffers whose storage holds the module's weights (16 bit, or fp32 when training in fp32)."""

    @abstractmethod
    def master_partitions(self) -> list[Tensor]:
        """This rank's fp32 master weights, in the order in which the optimiser updates them."""

    @abstractmethod
    def spans(self) -> list[list[Span]]:
        """For each of :meth:`master_partitions` what it holds of which parameter; the rest of it is padding."""

    def resident_tensors(self) -> list[Tensor]:
        """All that this engine keeps between steps: weights, master weights, gradients and their buffers, moments."""
        return [*self._here(self.flat_weights()), *self.optimizer_tensors(), *self.gradient_tensors()]

    def optimizer_tensors(self) -> list[Tensor]:
        """Master weights and moments on the training device, apart from what is weights or gradients as well."""
        moments = [t for state in self._moments().state.values() for t in state.values()]
        taken = _storages([*self.flat_weights(), *self.gradient_tensors()])
        state = self._here([*self.master_partitions(), *moments])
        return [t for t in state if t.untyped_storage()._cdata not in taken]

    def gradient_tensors(self) -> list[Tensor]:
        """Gradients and the buffers that they are collected in, on the training device."""
        return self._here(self._gradient_storage())

    def _here(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """On the training device; AdamW counts its steps in scalars, and offloaded state is on the host already."""
        here = self.device.type
        return [t.data for t in tensors if isinstance(t, Tensor) and t.dim() and t.device.type == here]

    # ---- how much memory gradients take

    def watch_gradients(self, on: bool = True) -> None:
        """Measure :attr:`peak_gradient_bytes` from now on, at every gradient (slow: for tests and reports)."""
        self._watching, self.peak_gradient_bytes = on, 0

    def gradient_bytes(self) -> int:
        """Bytes of gradient storage on the training device now: gradients, partitions and reduction buffers."""
        storages = {}
        for tensor in self._gradient_storage():
            if tensor is not None and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def _gradient_storage(self) -> Iterable[Tensor | None]:
        yield from (p.grad for p in self.parameters)

    def _sample_gradients(self) -> None:
        if self._watching:
            self.peak_gradient_bytes = max(self.peak_gradient_bytes, self.gradient_bytes())

    def _after_gradient(self, parameter: Parameter) -> None:
        """Called with each gradient as it appears in a backward pass, before DeepSpeed sees it."""
        if self.level and self._is_partial(parameter):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.groups.tp)
        self._sample_gradients()

    # ---- saving and loading

    def _moments(self) -> Any:
        """The torch optimiser inside."""
        return self.optimizer.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Master weights and AdamW state of this rank's partition."""
        state, masters = self._moments().state, self.master_partitions()
        return {
            "master": [p.detach().clone() for p in masters],
            "adam": [{k: v.clone() for k, v in state.get(p, {}).items()} for p in masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave at the same layout, and the module's weights from it. Collective over dp.
        For another layout there is :mod:`rl3d.engine.carry`.

        Raises:
            ValueError: partition sizes differ, so the state belongs to another layout.
        """
        masters = self.master_partitions()
        sizes, expected = [t.numel() for t in state["master"]], [t.numel() for t in masters]
        if sizes != expected:
            raise ValueError(
                f"optimiser state has partitions of {sizes} elements, this layout has {expected}; resume with the "
                f"layout that the checkpoint was written with"
            )
        moments = self._moments().state
        for master, saved, adam in zip(masters, state["master"], state["adam"], strict=True):
            master.data.copy_(saved.view_as(master))
            moments[master] = {k: v.to(master.device, copy=True).view(master.shape if v.dim() else ())
                               for k, v in adam.items()}  # fmt: skip
        self._weights_from_masters()
        self.weights_rebuilt()
        self.changes += 1

    @abstractmethod
    def _weights_from_masters(self) -> None:
        """Write the module's weights from the master weights. Collective over dp."""


class MicroBatchReduction(ZeroEngine):
    """Stages 2 and 3 without pipeline stages: DeepSpeed reduces the gradients of each micro-batch as they appear, into
    this rank's part, and releases them."""

    level = True

    @property
    def forward(self) -> Callable[..., Any]:
        """See :meth:`ZeroEngine.forward`."""
        return self.engine

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """See :meth:`ZeroEngine.accumulating`."""
        yield
        self._sample_gradients()

    def finish_gradients(self, shared_embedding: Parameter | None) -> None:
        """Nothing is left to do: partial gradients were completed one by one, and there is one stage."""


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors}


def start_deepspeed(model: torch.nn.Module, groups: ModelGroups, config: dict[str, Any], optimizer: Any) -> Any:
    """DeepSpeed's engine for ``model``. Collective over all ranks."""
    import deepspeed

    device = next(model.parameters()).device
    # DeepSpeed takes LOCAL_RANK for the device, which it is not where each rank sees one GPU, or ranks share one
    index = device.index if device.type == "cuda" else int(os.environ.get("LOCAL_RANK", 0))
    with local_rank(index):
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=index), model=model, optimizer=optimizer, mpu=ModelParallelUnit(groups),
            config=config, dist_init_required=False,
        )  # fmt: skip
    return engine


@contextlib.contextmanager
def local_rank(index: int) -> Iterator[None]:
    """DeepSpeed takes the device from LOCAL_RANK; anything that starts later must find it as it was."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
