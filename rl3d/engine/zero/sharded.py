"""Stage 3: weights, gradients, master weights and moments are all sharded; weights are gathered module by module."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.zero.base import MicroBatchReduction, Span, local_rank, start_deepspeed


class ShardedEngine(MicroBatchReduction):
    """``DeepSpeedZeroOptimizer_Stage3``. Data-parallel rank r holds elements [r * size, (r + 1) * size) of the flattened
    tensor-parallel shard of each parameter, size = ceil(elements / dp); the tail of the last ranks is padding."""

    shards_weights = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.device.type == "cuda":
            _compare_order_on(self.device.index)

    def _gradient_storage(self) -> Iterable[Tensor | None]:
        optimizer = self.optimizer
        yield from (p.grad for p in self.parameters)
        yield optimizer.grad_partitions_flat_buffer
        yield from (bucket.buffer for bucket in optimizer.ipg_buckets.values())
        yield from (p.grad for p in optimizer.fp32_partitioned_groups_flat)

    # ---- what is where

    def shard(self, parameter: Parameter) -> Tensor:
        """See :meth:`ZeroEngine.shard`."""
        return parameter.ds_tensor.data  # type: ignore[attr-defined]

    @property
    def rests_on_host(self) -> bool:
        """See :attr:`ZeroEngine.rests_on_host`."""
        return bool(self.optimizer.offload_param)

    def flat_weights(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.flat_weights`."""
        return list(self.optimizer.fp16_partitioned_groups_flat)

    def master_partitions(self) -> list[Tensor]:
        """See :meth:`ZeroEngine.master_partitions`: when training in fp32 these are the weights themselves."""
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def spans(self) -> list[list[Span]]:
        """See :meth:`ZeroEngine.spans`: the flat parts of a group's parameters, end to end."""
        out: list[list[Span]] = []
        for group in self.optimizer.fp16_groups:
            out.append([])
            at = 0
            for parameter in group:
                size, numel = parameter.ds_tensor.ds_numel, parameter.ds_numel
                start, stop = (min(rank * size, numel) for rank in (self.groups.dp_rank, self.groups.dp_rank + 1))
                if start < stop:
                    out[-1].append(Span(parameter, start, stop, at))
                at += size
        return out

    @torch.no_grad()
    def _weights_from_masters(self) -> None:
        for flat, master in zip(self.flat_weights(), self.master_partitions(), strict=True):
            flat.data.copy_(master.data)
        kept: list[Any] = self.optimizer.persistent_parameters  # small ones that stay whole between steps
        if kept:
            for parameter in kept:
                parameter.partition()
            kept[0].all_gather(kept)


def shard_frozen(model: torch.nn.Module, groups: ModelGroups, on_host: bool) -> Any:
    """Cut the weights of a model that only runs forward over data parallelism, as stage 3 does; its forward passes gather
    them module by module, so all ranks must run the same number. Collective over all ranks.

    Args:
        on_host: the parts rest in host memory.

    Returns:
        DeepSpeed's engine, to be kept: the model's hooks go with it.
    """

    parameters = list(model.parameters())
    pin = parameters[0].is_cuda
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False}
    if on_host:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
              "bf16": {"enabled": parameters[0].dtype == torch.bfloat16}}  # fmt: skip
    return start_deepspeed(model, groups, config, None)


def _compare_order_on(index: int) -> None:
    """DeepSpeed compares the order of parameters between ranks on the device that LOCAL_RANK names; on GPU ``index``
    instead. A scheduler may show each rank one GPU only, whatever its local rank."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, utils

    compare = utils.assert_ints_same_as_other_ranks

    def on_our_device(numbers: list[int]) -> None:
        with local_rank(index):
            compare(numbers)

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = on_our_device
