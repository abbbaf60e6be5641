"""The usual way to change a layout: all-gather every parameter to every rank, and cut the new shards out of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rl3d.bench.arena import place
from rl3d.layout import Box, ParamSpec, ShardLayout, matrix_shape


class GatherAll:
    """From ``source`` to ``target`` by all-gathers, a layer of each pipeline stage at a time.

    Every distinct part of a parameter is contributed once, by the least loaded of the ranks of ``group`` that hold it;
    contributions of different lengths are padded. ``ranks`` are the global ranks of ``group``.
    """

    def __init__(self, specs: Sequence[ParamSpec], source: ShardLayout, target: ShardLayout, rank: int,
                 ranks: Sequence[int], group: Any, device: torch.device) -> None:  # fmt: skip
        self.group, self.device, self.me, self.size = group, device, list(ranks).index(rank), len(ranks)
        self._windows = []
        wanted = target.holdings(rank, specs)
        position = {r: i for i, r in enumerate(ranks)}
        for window in _windows(specs, source):
            loads, parts = [0] * self.size, []
            for spec in window:
                for atom in source.atoms(spec):
                    holders = [position[r] for r in atom.holders if r in position]
                    if holders:
                        giver = min(holders, key=lambda holder: loads[holder])
                        at = atom.at(ranks[giver])
                        parts.append((spec, atom.box, giver, loads[giver], at.locate(atom.box), at.pitch))
                        loads[giver] += atom.box.rows * atom.box.cols
            if parts:
                self._windows.append((max(loads), parts, [(s, wanted[s.name]) for s in window if s.name in wanted]))

    @torch.no_grad()
    def run(self, src: Mapping[str, torch.Tensor], dst: Mapping[str, torch.Tensor]) -> None:
        """Gather and cut. Collective over the group."""
        for length, parts, wanted in self._windows:
            mine = torch.zeros(length, dtype=torch.bfloat16, device=self.device)
            for spec, box, giver, start, offset, pitch in parts:
                if giver == self.me:
                    part = mine[start : start + box.rows * box.cols].view(box.rows, box.cols)
                    part.copy_(place(src[spec.name], offset, pitch, box.rows, box.cols))
            everyone = torch.empty(self.size * length, dtype=torch.bfloat16, device=self.device)
            dist.all_gather(list(everyone.split(length)), mine, group=self.group)
            names = {spec.name for spec, _ in wanted}
            whole = {}
            for spec, box, giver, start, _, _ in parts:
                if spec.name in names:
                    if spec.name not in whole:
                        whole[spec.name] = torch.empty(matrix_shape(spec.shape), dtype=torch.bfloat16, device=self.device)
                    start += giver * length
                    values = everyone[start : start + box.rows * box.cols].view(box.rows, box.cols)
                    _cut(whole[spec.name], box).copy_(values)
            for spec, holdings in wanted:
                for box, offset, pitch in holdings:
                    place(dst[spec.name], offset, pitch, box.rows, box.cols).copy_(_cut(whole[spec.name], box))


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[box.row : box.row + box.rows, box.col : box.col + box.cols]


def _windows(specs: Sequence[ParamSpec], source: ShardLayout) -> list[list[ParamSpec]]:
    """Parameters gathered together: the i-th layer of every stage, so that no stage waits for another."""
    found: dict[int, list[ParamSpec]] = {}
    for spec in specs:
        at = -1
        if spec.layer is not None:
            at = next(list(held).index(spec.layer) for held in source.layers if spec.layer in held)
        found.setdefault(at, []).append(spec)
    return [found[at] for at in sorted(found)]
