"""What DeepSpeed really holds on each of two ranks; called by test_partitions.py."""

from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry, training_groups
from rl3d.engine.zero import AdamSettings, build_zero
from rl3d.layout import Mesh
from tests.reshard.models import llama

SPECS = llama(1, 6, 5, 7, 9, tied=True)
"""Odd sizes: 269 elements, padded to 272."""


class _Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        start = 0
        for index, spec in enumerate(SPECS):
            values = torch.arange(start, start + spec.numel, dtype=torch.float32).reshape(spec.shape)
            self.register_parameter(f"p{index}", torch.nn.Parameter(values.to(dtype)))
            start += spec.numel


def main(runtime: Any) -> dict[str, Any]:
    bootstrap.init_deepspeed()
    groups = training_groups(Mesh(1, 1, 2), GroupRegistry.of(runtime, "model"))
    mine: dict[str, Any] = {}
    for stage, dtype in ((1, torch.float32), (2, torch.float32), (1, torch.bfloat16), (3, torch.float32)):
        model = _Model(dtype)
        engine = build_zero(model, groups, stage, AdamSettings()).engine
        parameters = [getattr(model, f"p{i}") for i in range(len(SPECS))]
        if stage == 3:
            mine["shards"] = [p.ds_tensor.detach().float().tolist() for p in parameters]
            continue
        addresses = [getattr(p._hp_mapping, "lp_fragment_address", None) for p in parameters]
        name = f"{type(engine.optimizer).__name__} {stage}"
        mine[name] = [None if a is None else [a.start, a.start + a.numel] for a in addresses]
        optimizer = engine.optimizer
        flat = getattr(optimizer, "bf16_partitioned_groups", None) or optimizer.parallel_partitioned_bit16_groups
        assert len(flat) == 1 and len(flat[0]) == 2
        mine[name + " length"] = flat[0][0].numel()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    return {key: [e[key] for e in everyone] for key in mine}
