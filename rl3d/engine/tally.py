"""Sums, maxima and moments of what the ranks of a training layout hold, the same on every rank afterwards."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.algorithms.advantages import Moments, masked_moments, merge_moments
from rl3d.distributed.groups import ModelGroups


class Tally:
    """Combines numbers over ranks so that each token counts once.

    Values per token exist on the last pipeline stage, equal on all tensor-parallel ranks: one rank of each
    data-parallel share speaks for it. All methods are collective over ``cpu_group``.
    """

    def __init__(self, groups: ModelGroups, cpu_group: Any):
        self.on_last_stage = groups.is_last_stage
        self.speaks = groups.is_last_stage and groups.tp_rank == 0
        self._group = cpu_group

    def combine(self, sums: dict[str, float], tops: dict[str, float] | None = None) -> tuple[dict, dict]:
        """Add up ``sums`` and take the maxima of ``tops``."""
        tops = tops or {}
        nothing = float("-inf")
        added = torch.tensor([v if self.speaks else 0.0 for v in sums.values()], dtype=torch.float64)
        highest = torch.tensor([v if self.speaks else nothing for v in tops.values()], dtype=torch.float64)
        dist.all_reduce(added, group=self._group)
        if tops:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(sums, added.tolist())), dict(zip(tops, highest.tolist()))

    def moments(self, values: Tensor, mask: Tensor) -> Moments:
        """Moments of the masked values of all ranks, folded in the order of the ranks."""
        own = masked_moments(values.cpu(), mask.cpu())
        mine = torch.stack([own.count, own.mean, own.squares]) if self.speaks else torch.zeros(3, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, group=self._group)
        return merge_moments([Moments(*part) for part in every])

    def anywhere(self, flag: bool) -> bool:
        """Whether ``flag`` holds on a rank that speaks."""
        return self.combine({"flag": float(flag)})[0]["flag"] > 0

    def spread(self, prefix: str, values: Tensor, mask: Tensor) -> dict[str, float]:
        """``prefix/mean``, ``/max`` and ``/min`` of the masked values of all ranks; nothing when there are none."""
        inside = values[mask].double().cpu()
        low, high = inside.aminmax() if inside.numel() else (float("inf"), float("-inf"))
        sums, tops = self.combine(
            {"count": float(inside.numel()), "sum": float(inside.sum())}, {"max": float(high), "-min": -float(low)}
        )
        if not sums["count"]:
            return {}
        return {f"{prefix}/mean": sums["sum"] / sums["count"], f"{prefix}/max": tops["max"], f"{prefix}/min": -tops["-min"]}
