"""Regions: boxes on a global tensor, and where a box lies inside a rank's local memory.

Every parameter is seen as a matrix: ``(n,)`` becomes ``(n, 1)`` and trailing dimensions are folded into the columns. A
local position is a flat element offset and a row pitch, so that a box inside a matrix shard, a box inside a flat
ZeRO partition and a box inside a packed message are described alike.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rl3d.layout.parallel import LayoutError


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


def split_box(box: Box, max_elements: int) -> list[Box]:
    """Cut a box into pieces of at most ``max_elements``: by whole rows, and inside a row only when one is too long."""
    if max_elements < 1:
        raise LayoutError(f"cannot cut {box} into pieces of {max_elements} elements; the cap must hold at least one")
    if box.numel <= max_elements:
        return [box]
    if box.cols > max_elements:
        width = max_elements
        return [
            Box(box.row + r, box.col + c, 1, min(width, box.cols - c))
            for r in range(box.rows)
            for c in range(0, box.cols, width)
        ]
    # Equal heights: a short last piece would cost a copy for little.
    count = math.ceil(box.rows / (max_elements // box.cols))
    cuts = [box.rows * i // count for i in range(count + 1)]
    return [Box(box.row + a, box.col, b - a, box.cols) for a, b in pairwise(cuts)]


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


def cut_atoms(box: Box, holders: Sequence[Sequence[Holding]]) -> list[tuple[Box, tuple[tuple[int, Holding], ...]]]:
    """Cut ``box`` into atoms, each held entirely or not at all by every holder.

    Args:
        box: the needed box.
        holders: for each holder, the disjoint boxes that it has.

    Returns:
        ``(atom, ((holder index, the holding that contains it), ...))``, covering ``box`` exactly once in row-major
        order. An atom that nobody holds has no holders; neighbouring cells with the same holdings are one atom.
    """
    Cell = tuple[Box, tuple[tuple[int, Holding], ...]]
    meets = [
        (part, (index, holding))
        for index, holdings in enumerate(holders)
        for holding in holdings
        if (part := box.intersect(holding.box)) is not None
    ]
    row_cuts = sorted({box.row, box.row + box.rows, *(p.row for p, _ in meets), *(p.row + p.rows for p, _ in meets)})
    col_cuts = sorted({box.col, box.col + box.cols, *(p.col for p, _ in meets), *(p.col + p.cols for p, _ in meets)})
    bands: list[list[Cell]] = []
    for top, bottom in pairwise(row_cuts):
        band: list[Cell] = []
        for left, right in pairwise(col_cuts):
            cell = Box(top, left, bottom - top, right - left)
            has = tuple(owner for part, owner in meets if part.contains(cell))
            if band and band[-1][1] == has:
                cell = Box(top, band[-1][0].col, cell.rows, band[-1][0].cols + cell.cols)
                band.pop()
            band.append((cell, has))
        if bands and [(b.col, b.cols, h) for b, h in bands[-1]] == [(b.col, b.cols, h) for b, h in band]:
            bands[-1] = [(b._replace(rows=b.rows + bottom - top), h) for b, h in bands[-1]]
        else:
            bands.append(band)
    return [atom for band in bands for atom in band]
