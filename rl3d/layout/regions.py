"""Regions: boxes on a global tensor, and where a box lies inside a rank's local memory.

Every parameter is seen as a matrix: ``(n,)`` becomes ``(n, 1)`` and trailing dimensions are folded into the columns. A
local position is a flat element offset and a row pitch, so that a box inside a matrix shard, a box inside a flat
ZeRO partition and a box inside a packed message are described alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a global matrix: ``rows`` x ``cols`` elements from ``(row, col)``."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def intersect(self, other: "Box") -> "Box | None":
        """The common rectangle, or ``None`` when there is none."""
        row, col = max(self.row, other.row), max(self.col, other.col)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        cols = min(self.col + self.cols, other.col + other.cols) - col
        return Box(row, col, rows, cols) if rows > 0 and cols > 0 else None

    def contains(self, other: "Box") -> bool:
        return self.intersect(other) == other


class Holding(NamedTuple):
    """A box and where it lies in local memory: element ``(r, c)`` of the box at ``offset + r * pitch + c``."""

    box: Box
    offset: int
    pitch: int

    def locate(self, part: Box) -> int:
        """Flat local offset of the first element of ``part``, a box inside this one."""
        return self.offset + (part.row - self.box.row) * self.pitch + part.col - self.box.col


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The two-dimensional view of a parameter: first dimension by the product of the others (1 when 1-D)."""
    if not shape:
        return (1, 1)
    return (shape[0], math.prod(shape[1:]))


def flat_interval(holding: Holding, start: int, stop: int) -> list[Holding]:
    """The part of a holding inside elements ``start`` to ``stop`` of its contiguous local tensor.

    The result lies in a tensor of its own that begins with element ``start``: a flat ZeRO partition. It is at most three
    boxes: the end of a row, whole rows, the beginning of a row.
    """
    box, pitch = holding.box, holding.pitch
    top, left = divmod(holding.offset, pitch)
    (first, begin), (last, end) = divmod(start, pitch), divmod(stop, pitch)
    if first == last:
        runs = [Box(first, begin, 1, end - begin)]
    else:
        whole = first + (begin > 0)
        runs = [Box(whole, 0, last - whole, pitch), Box(last, 0, 1, end)]
        runs[:0] = [Box(first, begin, 1, pitch - begin)] if begin else []
    out = []
    for run in runs:
        part = run.intersect(Box(top, left, box.rows, box.cols))
        if part is not None:
            at = part.row * pitch + part.col - start
            out.append(Holding(part._replace(row=part.row - top + box.row, col=part.col - left + box.col), at, pitch))
    return out
