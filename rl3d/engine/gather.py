"""Results of generation replicas, brought together on every rank in an order that no layout has a say in."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from rl3d.distributed.groups import ModelGroups

T = TypeVar("T")


def gather_from_replicas[T](mine: Mapping[Any, T], groups: ModelGroups | None, cpu_group: Any) -> dict[Any, T]:
    """Union of what all replicas hold, on every rank, sorted by key. Collective over ``cpu_group``.

    The ranks of a replica hold the same results; the one with slot 0 speaks for it. Ranks that do not generate pass
    ``groups=None`` and nothing.

    Raises:
        ValueError: two replicas hold the same key.
    """
    speaks = groups is not None and groups.tp_rank == 0
    parts: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(parts, dict(mine) if speaks else {}, group=cpu_group)
    out: dict[Any, T] = {}
    for rank, part in enumerate(parts):
        twice = out.keys() & part.keys()
        if twice:
            raise ValueError(f"rank {rank} brings results that another replica has too: {sorted(twice)[:4]}")
        out.update(part)
    return dict(sorted(out.items()))
