"""megatron-core's own resharding of the same weights: its planner and its executor, with the tensors of an arena."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rl3d.layout import ParamSpec


class Swap:
    """``megatron.core.resharding`` between two sets of local tensors. Construction, which plans, and ``run`` are collective.

    ``source`` and ``target`` are (local tensors, tensor-parallel size, groups): ``groups`` maps ``tp``, ``dp`` and ``pp``
    to all groups of ranks.
    """

    def __init__(self, specs: Sequence[ParamSpec], rank: int, source: tuple[Mapping[str, torch.Tensor], int, Any],
                 target: tuple[Mapping[str, torch.Tensor], int, Any], device: torch.device) -> None:  # fmt: skip
        from megatron.core.resharding.planner import build_local_reshard_plan

        self.device = device
        by_name = {spec.name: spec for spec in specs}
        self._modules = [_module(by_name, tensors, tp, _groups(groups, rank)) for tensors, tp, groups in (source, target)]
        with _without_cuda(device):
            self._plan = build_local_reshard_plan(*self._modules)
        self._service = _service(device)

    @torch.no_grad()
    def run(self) -> None:
        from megatron.core.resharding.execution import execute_reshard_plan

        with _without_cuda(self.device):
            execute_reshard_plan(self._plan, *self._modules, self._service)


def _groups(lists: Mapping[str, Sequence[Sequence[int]]], rank: int) -> dict[str, Any]:
    """Groups that only tell megatron-core who belongs together; nothing travels through them."""
    found = {}
    for axis, groups in lists.items():
        for members in groups:
            made = dist.new_group(list(members), backend="gloo")
            if rank in members:
                found[axis] = made
    return found


def _module(specs: Mapping[str, ParamSpec], tensors: Mapping[str, torch.Tensor], tp: int, groups: dict[str, Any]) -> Any:
    """A tree of modules with the names that megatron-core's models have, layers numbered from this rank's first."""
    root = torch.nn.Module()
    layers = sorted({spec.layer for name in tensors if (spec := specs[name]).layer is not None})
    for name, tensor in tensors.items():
        spec, words, at = specs[name], name.split("."), root
        if spec.layer is not None:
            words[words.index(str(spec.layer))] = str(layers.index(spec.layer))
        for word in words[:-1]:
            if word not in dict(at.named_children()):
                at.add_module(word, torch.nn.Module())
            at = at.get_submodule(word)
            if word.isdigit() and spec.layer is not None:
                at.layer_number = spec.layer + 1  # type: ignore[assignment]
        parameter: Any = torch.nn.Parameter(tensor, requires_grad=False)
        if spec.dim is not None and tp > 1:
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = spec.dim, max(len(spec.blocks), 1)
        at.register_parameter(words[-1], parameter)
    root.pg_collection = SimpleNamespace(ep=None, **groups)  # type: ignore[assignment]
    return root


def _service(device: torch.device) -> Any:
    if device.type == "cuda":
        from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

        return NCCLCopyService()
    from megatron.core.resharding.copy_services.base import (
        CopyService,
        RecvOp,
        SendOp,
        match_local_ops_by_task_id,
    )

    class GlooOnHost(CopyService):
        """What megatron-core's own services do on GPUs, for tensors of the host."""

        def __init__(self) -> None:
            super().__init__(None)
            self.sends: list[Any] = []
            self.receives: list[Any] = []

        def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
            self.sends.append(SendOp(task_id, src_tensor, dest_rank))

        def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
            self.receives.append(RecvOp(task_id, dest_tensor, src_rank))

        def run(self) -> None:
            here = [op for op in self.sends if op.dest_rank == self.rank]
            kept = [op for op in self.receives if op.src_rank == self.rank]
            for sent, received in match_local_ops_by_task_id(here, kept, "gloo", self.rank):
                received.tensor.copy_(sent.tensor)
            waiting = [dist.isend(op.tensor.detach(), op.dest_rank, tag=op.task_id)
                       for op in self.sends if op.dest_rank != self.rank]  # fmt: skip
            waiting += [dist.irecv(op.tensor, op.src_rank, tag=op.task_id)
                        for op in self.receives if op.src_rank != self.rank]  # fmt: skip
            for work in waiting:
                if work is not None:
                    work.wait()
            self.sends.clear()
            self.receives.clear()

    return GlooOnHost()


@contextmanager
def _without_cuda(device: torch.device) -> Iterator[None]:
    """Its executor synchronises the GPU; on a host without one there is nothing to wait for."""
    original = torch.cuda.synchronize
    if device.type == "cpu":
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.synchronize = original
