"""DeepSpeed ZeRO around a megatron-core module: the only place that touches DeepSpeed's internals (0.19).

Two optimisers stand behind one small class: ``DeepSpeedZeroOptimizer`` (fp32, stage 1) and ``BF16_Optimizer`` (bf16 with
fp32 master weights and fp32 gradient accumulation).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


class ZeroEngine:
    """A module under ZeRO: gradients in, one optimiser step out.

    Args:
        model: this rank's part of the model, weights loaded; its parameters become views of DeepSpeed's flat buffers.
        groups: where it lives.
        stage: ZeRO stage; 1 in this release.
        settings: AdamW and clipping.
        overrides: the user's ``deepspeed:`` section, merged over ours.

    Raises:
        ValueError: a stage that this release does not train with.
    """

    def __init__(self, model: torch.nn.Module, groups: ModelGroups, stage: int, settings: AdamSettings,
                 overrides: dict[str, Any] | None = None):  # fmt: skip
        if stage != 1:
            raise ValueError(f"layout.train: zero{stage} is not supported by this release; expected zero1")
        import deepspeed

        self.module, self.groups, self.settings = model, groups, settings
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.bf16 = parameters[0].dtype == torch.bfloat16
        config = _merge(_config(settings, stage, self.bf16, sum(p.numel() for p in parameters)), overrides or {})
        optimizer = torch.optim.AdamW(
            parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
            fused=True,
        )  # fmt: skip
        # DeepSpeed takes LOCAL_RANK for the device, which it is not where each rank sees one GPU, or ranks share one
        index = parameters[0].device.index if parameters[0].is_cuda else int(os.environ.get("LOCAL_RANK", 0))
        with _local_rank(index):
            self.engine, *_ = deepspeed.initialize(
                args=SimpleNamespace(device_rank=index), model=model, optimizer=optimizer, mpu=ModelParallelUnit(groups),
                config=config, dist_init_required=False,
            )  # fmt: skip
        self.optimizer = self.engine.optimizer

    # ---- one step

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around all backward passes of one step; gradients are reduced over data parallelism on the way out."""
        if self.bf16:
            yield
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.allreduce_gradients()
        else:
            with self.engine.coalesce_grad_reduction():
                yield

    def gradient(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """This rank's accumulated gradient before the reduction, wherever the optimiser keeps it."""
        grad = getattr(parameter, "_hp_grad", None)
        return parameter.grad if grad is None else grad

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> tuple[float, bool]:
        """Clip and update. Returns the gradient norm before clipping and whether the step was taken.

        A norm that is not finite skips the step on all ranks: weights and moments stay as they were.
        """
        self.engine.step()
        skipped = bool(getattr(self.optimizer, "overflow", False))
        norm = self.engine.get_global_grad_norm()
        return (float("nan") if norm is None else float(norm)), not skipped

    # ---- what is where

    def flat_weights(self) -> list[Tensor]:
        """The flat buffers that the module's parameters are views of (16 bit, or fp32 when training in fp32)."""
        return list(self.optimizer.bf16_groups_flat if self.bf16 else self.optimizer.bit16_groups_flat)

    def _partitions(self) -> list[list[Tensor]]:
        return self.optimizer.bf16_partitioned_groups if self.bf16 else self.optimizer.parallel_partitioned_bit16_groups

    def master_partitions(self) -> list[Tensor]:
        """This rank's fp32 master weights, one flat tensor for each parameter group."""
        if self.bf16:
            return list(self.optimizer.fp32_groups_flat_partition)
        return list(self.optimizer.single_partition_of_fp32_groups)

    # ---- saving and loading, same layout

    def state_dict(self) -> dict[str, Any]:
        """Master weights and AdamW state of this rank's partition."""
        inner = self.optimizer.optimizer
        return {
            "master": [p.detach().clone() for p in self.master_partitions()],
            "adam": inner.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave at the same layout, and the module's weights from it. Collective over dp.

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
        self.optimizer.optimizer.load_state_dict(state["adam"])
        for master, saved, flat, parts in zip(
            masters, state["master"], self.flat_weights(), self._partitions(), strict=True
        ):
            master.data.copy_(saved)
            own = parts[self.groups.dp_rank]
            own.data.copy_(master.data)
            if self.groups.dp_size > 1:
                dist.all_gather_into_tensor(flat.data, own.data.clone(), group=self.groups.dp)


def _config(settings: AdamSettings, stage: int, bf16: bool, numel: int) -> dict[str, Any]:
    bucket = min(numel, 50_000_000)  # elements; DeepSpeed's default of 500M would stage 2 GB in fp32
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # megatron-core's schedule owns micro-batches
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": settings.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "overlap_comm": False, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
        },
    }  # fmt: skip
    if bf16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@contextlib.contextmanager
def _local_rank(index: int) -> Iterator[None]:
    """DeepSpeed insists on LOCAL_RANK, which a plain process has not; left set alone it would mislead child processes."""
    missing = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(index))
    try:
        yield
    finally:
        if missing:
            del os.environ["LOCAL_RANK"]
