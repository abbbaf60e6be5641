"""Boxes of a whole layout as integer arrays, and where the boxes of two layouts meet."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import Cell, Holding, ParamSpec, matrix_shape
from rl3d.layout.shards import tp_holdings

Ints = NDArray[np.int64]

CELL, ROW, COL, ROWS, COLS, OFFSET, PITCH = range(7)
"""Columns of a table of boxes: index of the cell that holds it, the global box, where it lies locally."""


def boxes_of(spec: ParamSpec, cells: Sequence[Cell]) -> tuple[Ints, Ints]:
    """Real boxes and padding boxes of all cells of a parameter, each an ``(n, 7)`` table; ordered by cell.

    Says the same as ``cell.shard(spec)`` for every cell, without a Python object per box.
    """
    tables: tuple[list[Ints], list[Ints]] = ([], [])
    numbered = sorted(enumerate(cells), key=lambda item: item[1].slot)
    for slot, group in groupby(numbered, key=lambda item: item[1].slot):
        members = list(group)
        cell = members[0][1]
        index = np.array([i for i, _ in members], np.int64)
        start, stop = (np.array([c[k] for _, c in members], np.int64) for k in (2, 3))
        for holdings, out in zip(tp_holdings(spec, cell.tp, slot), tables, strict=True):
            for holding in holdings:
                out.append(_inside(holding, index, start, stop, cell.length is not None))
        if cell.length is not None:
            tail = cell.length - (stop - start)
            ends = np.zeros((len(index), 7), np.int64)
            ends[:, CELL], ends[:, ROW], ends[:, ROWS] = index, matrix_shape(spec.shape)[0], 1
            ends[:, COLS], ends[:, OFFSET], ends[:, PITCH] = tail, stop - start, tail
            tables[1].append(ends[tail > 0])
    real, pads = (np.concatenate(t) if t else np.zeros((0, 7), np.int64) for t in tables)
    return tuple(t[np.lexsort((t[:, OFFSET], t[:, CELL]))] for t in (real, pads))  # type: ignore[return-value]


def _inside(holding: Holding, index: Ints, start: Ints, stop: Ints, own_tensor: bool) -> Ints:
    """:func:`rl3d.layout.flat_interval` for many intervals of one holding."""
    box, pitch = holding.box, holding.pitch
    top, left = divmod(holding.offset, pitch)
    first, begin = np.divmod(start, pitch)
    last, end = np.divmod(stop, pitch)
    same, whole = first == last, first + (begin > 0)
    one = np.ones_like(first)
    runs = (
        (same | (begin > 0), first, begin, one, np.where(same, end - begin, pitch - begin)),
        (~same, whole, 0 * one, last - whole, pitch * one),
        (~same, last, 0 * one, one, end),
    )
    out = []
    for valid, row, col, rows, cols in runs:
        row, rows = np.maximum(row, top), np.minimum(row + rows, top + box.rows)
        col, cols = np.maximum(col, left), np.minimum(col + cols, left + box.cols)
        keep = valid & (rows > row) & (cols > col)
        at = row * pitch + col - (start if own_tensor else 0)
        table = np.stack([index, row - top + box.row, col - left + box.col, rows - row, cols - col, at, pitch * one], 1)
        out.append(table[keep])
    return np.concatenate(out)


def distinct(values: Ints) -> Ints:
    """Different values, rising: ``np.unique`` without its overhead on short arrays."""
    values = np.sort(values, kind="stable")  # quick on a few rising runs
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values


class Meeting(NamedTuple):
    """Boxes that lie in one cell of each of two layouts: columns over the meetings."""

    src_cell: Ints
    dst_cell: Ints
    row: Ints
    col: Ints
    rows: Ints
    cols: Ints
    src_offset: Ints
    src_pitch: Ints
    dst_offset: Ints
    dst_pitch: Ints


def meet(src: Ints, dst: Ints) -> Meeting:
    """Every non-empty intersection of a box of ``src`` with a box of ``dst``, ordered by destination position."""
    chunk = max(1, (1 << 22) // max(len(dst), 1))
    pairs = [_overlapping(src[at : at + chunk], dst, at) for at in range(0, len(src), chunk)]
    i, j = (np.concatenate([p[k] for p in pairs]) if pairs else np.zeros(0, np.int64) for k in (0, 1))
    a, b = src[i], dst[j]
    row, col = np.maximum(a[:, ROW], b[:, ROW]), np.maximum(a[:, COL], b[:, COL])
    rows = np.minimum(a[:, ROW] + a[:, ROWS], b[:, ROW] + b[:, ROWS]) - row
    cols = np.minimum(a[:, COL] + a[:, COLS], b[:, COL] + b[:, COLS]) - col
    at = [t[:, OFFSET] + (row - t[:, ROW]) * t[:, PITCH] + col - t[:, COL] for t in (a, b)]
    order = np.lexsort((at[1], b[:, CELL], a[:, CELL]))
    columns = (a[:, CELL], b[:, CELL], row, col, rows, cols, at[0], a[:, PITCH], at[1], b[:, PITCH])
    return Meeting(*(np.ascontiguousarray(column[order]) for column in columns))


def _overlapping(a: Ints, b: Ints, shift: int) -> tuple[Ints, Ints]:
    def apart(low: int, size: int) -> NDArray[np.bool_]:
        x, y = a[:, low, None], b[None, :, low]
        return (x + a[:, size, None] <= y) | (y + b[None, :, size] <= x)

    i, j = np.nonzero(~(apart(ROW, ROWS) | apart(COL, COLS)))
    return i + shift, j


def area(table: Ints, cells: int) -> Ints:
    """Elements of each cell."""
    out = np.zeros(cells, np.int64)
    np.add.at(out, table[:, CELL], table[:, ROWS] * table[:, COLS])
    return out
