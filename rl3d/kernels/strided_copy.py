"""Many strided copies as one launch: boxes of any sizes and pitches, described once by a table of addresses.

A switch copies thousands of boxes, most of them rows cut out of matrices. One launch a box leaves a GPU waiting for
launches; here every tile of every box is one program of a single launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl3d.kernels.backend import constexpr, jit, tl, use_triton

_TILE = 4096  # units a program copies
_WIDTHS = (4096, 1024, 256, 64)  # of a tile, in units; the height follows


@jit
def _copy(boxes_ptr, tiles_ptr, UNIT: constexpr, BYTES: constexpr, ALIGN: constexpr, WIDTH: constexpr, HEIGHT: constexpr):
    tile = tiles_ptr + tl.program_id(0).to(tl.int64) * 3
    box = boxes_ptr + tl.load(tile) * 6
    row = tl.load(tile + 1) + tl.arange(0, HEIGHT)[:, None]
    column = tl.multiple_of(tl.load(tile + 2), WIDTH) + tl.arange(0, WIDTH)[None, :]
    inside = (row < tl.load(box + 2)) & (column < tl.multiple_of(tl.load(box + 3), ALIGN))
    source = tl.multiple_of(tl.load(box).to(tl.pointer_type(UNIT)), BYTES)  # of a pointer, in bytes
    target = tl.multiple_of(tl.load(box + 1).to(tl.pointer_type(UNIT)), BYTES)
    source_pitch = tl.multiple_of(tl.load(box + 4), ALIGN)
    target_pitch = tl.multiple_of(tl.load(box + 5), ALIGN)
    value = tl.load(source + row * source_pitch + column, mask=inside)
    tl.store(target + row * target_pitch + column, value, mask=inside)


@dataclass(frozen=True)
class _Launch:
    """Tiles of one unit and width: ``boxes`` int64 [B, 6] (addresses in bytes, rows, columns, pitches in units), ``tiles``
    int64 [T, 3] (box, first row, first column)."""

    unit: int
    align: int
    width: int
    boxes: Tensor
    tiles: Tensor

    def run(self) -> None:
        kind = {8: tl.int64, 2: tl.int16, 1: tl.int8}[self.unit]
        _copy[(len(self.tiles),)](self.boxes, self.tiles, UNIT=kind, BYTES=self.unit * self.align, ALIGN=self.align,
                                  WIDTH=self.width, HEIGHT=_TILE // self.width, num_warps=8)  # fmt: skip


class CopyTable:
    """Copies from sources to targets of the same shapes and dtypes, prepared once and run any number of times.

    Tensors have one or two dimensions and their last one is contiguous. Targets do not overlap each other or any source.
    Sources may lie on another device that ``device`` reads directly. The tensors are kept alive; their memory must stay
    where it is.

    Args:
        pairs: (target, source).
        device: where the copies run.

    Raises:
        ValueError: shapes or dtypes that differ, or another stride than 1 in the last dimension.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        for target, source in pairs:
            if target.shape != source.shape or target.dtype != source.dtype or not 1 <= target.dim() <= 2:
                ends = " to ".join(f"{t.dtype} {tuple(t.shape)}" for t in (source, target))
                raise ValueError(f"cannot copy {ends}: expected the same dtype and the same shape of one or two dimensions")
            if target.shape[-1] > 1 and (target.stride(-1), source.stride(-1)) != (1, 1):
                raise ValueError(f"strides {source.stride()} and {target.stride()}: expected contiguous rows")
            if target.numel():
                self._targets.append(target.detach())
                self._sources.append(source.detach())
        self.nbytes = sum(t.numel() * t.element_size() for t in self._targets)
        self._launches: list[_Launch] | None = None
        if self._targets and use_triton(self._targets[0]) and _reachable(self._sources, device):
            self._launches = _plan(self._targets, self._sources, device)

    def __len__(self) -> int:
        return len(self._targets)

    @torch.no_grad()
    def run(self) -> None:
        """Copy all, on the current stream; on a GPU without waiting for it."""
        if self._launches is not None:
            for launch in self._launches:
                launch.run()
        elif self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)


def _reachable(sources: Sequence[Tensor], device: torch.device) -> bool:
    """Whether a kernel on ``device`` can read all sources; torch's own copies open the way from device to device."""
    others = {source.device: source for source in sources if source.device != device}
    for other, source in others.items():
        if device.type != "cuda" or other.type != "cuda" or not torch.cuda.can_device_access_peer(device, other):
            return False
        torch.empty(1, dtype=source.dtype, device=device).copy_(source[:1].flatten()[:1])
    return True


def _plan(targets: Sequence[Tensor], sources: Sequence[Tensor], device: torch.device) -> list[_Launch]:
    """One launch for each combination of unit and tile width that occurs; units as wide as all addresses allow."""
    columns = np.array([_box(source, target) for target, source in zip(targets, sources, strict=True)], dtype=np.int64)
    unit, align = units_of(columns)
    boxes = columns.copy()
    boxes[:, 3:] //= unit[:, None]
    padded = np.stack([-(-boxes[:, 3] // width) * width * np.maximum(boxes[:, 2], _TILE // width) for width in _WIDTHS])
    width = np.array(_WIDTHS)[padded.argmin(axis=0)]  # the fewest units outside the box
    launches = []
    for key in sorted(set(zip(unit.tolist(), align.tolist(), width.tolist()))):
        chosen = boxes[(unit == key[0]) & (align == key[1]) & (width == key[2])]
        launch = _Launch(*key, torch.from_numpy(chosen).to(device), torch.from_numpy(_tiles(chosen, key[2])).to(device))
        empty = _Launch(*key, torch.zeros_like(launch.boxes[:1]), torch.zeros_like(launch.tiles[:1]))
        empty.run()  # compiles the kernel now and not during the first copy; a box without rows touches no memory
        launches.append(launch)
    return launches


def units_of(boxes: Any) -> tuple[Any, Any]:
    """Bytes that a lane copies, 8, 2 or 1, and how many such units addresses, rows and pitches are multiples of.

    Args:
        boxes: int64 [B, 6]: two addresses, rows, and bytes of a row and from row to row at both ends.
    """
    size = np.bitwise_or.reduce(boxes[:, [0, 1, 3, 4, 5]], axis=1)  # what divides all is the lowest bit set in any
    size = np.minimum(size & -size, 16)
    return np.select([size >= 8, size >= 2], [8, 2], 1), np.where(size == 16, 2, 1)  # two 8-byte words at once


def _box(source: Tensor, target: Tensor) -> tuple[int, ...]:
    """Addresses, rows, and bytes of a row and from row to row at both ends; a box without gaps is one row."""
    itemsize = source.element_size()
    rows, columns = (1, len(source)) if source.dim() == 1 else source.shape
    pitches = [t.stride(0) if rows > 1 else columns for t in (source, target)]
    if pitches == [columns, columns]:
        rows, columns = 1, rows * columns
        pitches = [columns, columns]
    places = (source.data_ptr(), target.data_ptr())
    return (*places, rows, columns * itemsize, *(pitch * itemsize for pitch in pitches))


def _tiles(boxes: Any, width: int) -> Any:
    """Every tile of every box, box after box, row after row."""
    down, across = -(-boxes[:, 2] // (_TILE // width)), -(-boxes[:, 3] // width)
    count = down * across
    box = np.repeat(np.arange(len(boxes)), count)
    index = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    return np.stack([box, index // across[box] * (_TILE // width), index % across[box] * width], axis=1)
