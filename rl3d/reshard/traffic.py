"""What may have to move: boxes with one set of holders and one set of takers, grouped into classes.

Layers of one shape that are on the same stages are planned once; a class is one stream of bytes, in layer order, that a
set of ranks holds and a set of ranks wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import Cell, LayoutError, ParamSpec, ShardLayout, itemsize
from rl3d.reshard.boxes import CELL, Ints, Meeting, area, boxes_of, meet


@dataclass(frozen=True)
class Boxes:
    """Boxes that move, one for each shape of parameter, and the order in which parameters have them.

    ``width`` is bytes per element. ``entry_*`` list the contents of all classes: class ``c`` is the entries from
    ``pointer[c]`` to ``pointer[c + 1]``, in layer order, each a box of a parameter.
    """

    row: Ints
    col: Ints
    rows: Ints
    cols: Ints
    src_offset: Ints
    src_pitch: Ints
    dst_offset: Ints
    dst_pitch: Ints
    width: Ints
    entry_box: NDArray[np.int32]
    entry_param: NDArray[np.int32]
    pointer: Ints

    @cached_property
    def entry_bytes(self) -> Ints:
        """Bytes of each entry."""
        return (self.rows * self.cols * self.width)[self.entry_box]

    @cached_property
    def position(self) -> Ints:
        """Bytes before each entry, over all classes; one more element for the total."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.entry_bytes)])

    @cached_property
    def class_bytes(self) -> Ints:
        """Bytes of each class."""
        return np.diff(self.position[self.pointer])

    def round_down(self, cls: Ints, at: Ints, limit: int) -> Ints:
        """The nearest place at or before byte ``at`` of class ``cls`` where a box may be cut.

        Rows of up to ``limit`` bytes are kept whole, longer ones are cut between elements.
        """
        base = self.position[self.pointer[cls]]
        end = at >= self.class_bytes[cls]
        entry = np.searchsorted(self.position, base + at, "right") - 1
        entry = np.minimum(entry, len(self.entry_box) - 1)
        box = self.entry_box[entry]
        row = self.cols[box] * self.width[box]
        unit = np.where(row <= limit, row, self.width[box])
        inside = base + at - self.position[entry]
        return np.where(end, at, at - inside % unit)

    def grain(self, limit: int) -> Ints:
        """For each class, the most that :meth:`round_down` can take away, plus one byte."""
        row = self.cols * self.width
        unit = np.where(row <= limit, row, self.width)[self.entry_box]
        return np.maximum.reduceat(unit, self.pointer[:-1]) if len(unit) else np.zeros(0, np.int64)

    def columns(self) -> dict[str, NDArray]:
        """All arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Traffic:
    """Classes with the ranks that hold and want each; both ascend and may overlap.

    ``fills`` are padding boxes of the destination: rows of (parameter, rank, rows, cols, offset, pitch).
    """

    boxes: Boxes
    holders: tuple[Ints, ...]
    takers: tuple[Ints, ...]
    first: Ints
    """Place in layer order of each class's first parameter."""
    fills: Ints

    @cached_property
    def lacking(self) -> tuple[Ints, ...]:
        """Takers of each class that do not hold it."""
        return self._takers(False)

    @cached_property
    def keeping(self) -> tuple[Ints, ...]:
        """Takers of each class that hold it."""
        return self._takers(True)

    def _takers(self, holding: bool) -> tuple[Ints, ...]:
        size = max((int(r[-1]) for r in (*self.holders, *self.takers) if len(r)), default=-1) + 1
        held = np.zeros(size, bool)
        out = []
        for holders, takers in zip(self.holders, self.takers, strict=True):
            held[holders] = True
            out.append(takers[held[takers] == holding])
            held[holders] = False
        return tuple(out)


def layer_order(specs: Sequence[ParamSpec]) -> Ints:
    """Indices of the parameters in layer order: before the layers, by layer, behind them."""

    def key(index: int) -> tuple[int, int]:
        spec = specs[index]
        if spec.layer is not None:
            return (1, spec.layer)
        return (0, 0) if "pre" in spec.place else (2, 0)

    return np.array(sorted(range(len(specs)), key=key), np.int64)


class _Kind:
    """Parameters that differ in name and layer only: everything about their boxes is the same."""

    def __init__(self, spec: ParamSpec, src: tuple[Cell, ...], dst: tuple[Cell, ...]) -> None:
        self.spec, self.src, self.dst = spec, src, dst
        self.members: list[int] = []


def find_traffic(specs: Sequence[ParamSpec], src: ShardLayout, dst: ShardLayout) -> Traffic:
    """Cut what ``dst`` wants into boxes that each source cell holds entirely or not at all, and group them.

    Raises :class:`LayoutError` when part of a parameter is held by nobody.
    """
    kinds: dict[tuple, _Kind] = {}
    for index, spec in enumerate(specs):
        a, b = src.cells(spec), dst.cells(spec)
        key = (id(a), id(b), spec.shape, spec.dim, spec.blocks, spec.valid_rows, itemsize(spec.dtype))
        kinds.setdefault(key, _Kind(spec, a, b)).members.append(index)

    groups = _Interner()
    tables: dict[tuple, tuple[Ints, Ints]] = {}
    meetings: list[Meeting] = []
    keys: list[Ints] = []
    fills: list[Ints] = []
    met: dict[tuple, Meeting] = {}
    for kind in kinds.values():
        spec = kind.spec
        shape = (spec.shape, spec.dim, spec.blocks, spec.valid_rows)
        sides = []
        for cells in (kind.src, kind.dst):
            geometry = (*shape, tuple(c[:5] for c in cells))
            if geometry not in tables:
                tables[geometry] = boxes_of(spec, cells)
            sides.append(geometry)
        pair = (sides[0], sides[1])
        if pair not in met:
            met[pair] = meet(tables[sides[0]][0], tables[sides[1]][0])
        meeting = met[pair]
        _require_cover(kind, tables[sides[1]][0], meeting)
        meetings.append(meeting)
        keys.append(groups.ids(kind.src)[meeting.src_cell] << 32 | groups.ids(kind.dst)[meeting.dst_cell])
        fills.append(_fills(kind, tables[sides[1]][1]))

    pairs = np.concatenate(keys) if keys else np.zeros(0, np.int64)
    classes, cls = np.unique(pairs, return_inverse=True)
    order = np.empty(len(specs), np.int64)
    order[layer_order(specs)] = np.arange(len(specs))
    boxes, first = _contents(list(kinds.values()), meetings, cls.reshape(-1), len(classes), order)
    return Traffic(
        boxes,
        tuple(groups.ranks[i] for i in (classes >> 32).tolist()),
        tuple(groups.ranks[i] for i in (classes & 0xFFFFFFFF).tolist()),
        first,
        np.concatenate(fills) if fills else np.zeros((0, 6), np.int64),
    )


class _Interner:
    """Equal sets of ranks get one number."""

    def __init__(self) -> None:
        self.ranks: list[Ints] = []
        self._number: dict[tuple[int, ...], int] = {}
        self._known: dict[int, Ints] = {}

    def ids(self, cells: tuple[Cell, ...]) -> Ints:
        if id(cells) not in self._known:
            for cell in cells:
                if cell.ranks not in self._number:
                    self._number[cell.ranks] = len(self.ranks)
                    self.ranks.append(np.array(cell.ranks, np.int64))
            self._known[id(cells)] = np.array([self._number[c.ranks] for c in cells], np.int64)
        return self._known[id(cells)]


def _require_cover(kind: _Kind, wanted: Ints, meeting: Meeting) -> None:
    found = np.zeros(len(kind.dst), np.int64)
    np.add.at(found, meeting.dst_cell, meeting.rows * meeting.cols)
    missing = np.flatnonzero(area(wanted, len(kind.dst)) != found)
    if len(missing):
        box = wanted[wanted[:, CELL] == missing[0], 1:5][0].tolist()
        raise LayoutError(
            f"{kind.spec.name}: nobody holds all of {tuple(box)} (row, column, rows, columns) that ranks "
            f"{kind.dst[missing[0]].ranks} need; the source layout must hold the whole model"
        )


def _fills(kind: _Kind, pads: Ints) -> Ints:
    if not len(pads):
        return np.zeros((0, 6), np.int64)
    ranks = [kind.dst[c].ranks for c in pads[:, CELL].tolist()]
    times = np.array([len(r) for r in ranks])
    lines = np.repeat(pads[:, 3:], times, axis=0)
    rank = np.concatenate([np.array(r, np.int64) for r in ranks])
    members = np.array(kind.members, np.int64)
    table = np.empty((len(members), len(lines), 6), np.int64)
    table[:, :, 0], table[:, :, 1], table[:, :, 2:] = members[:, None], rank, lines
    return table.reshape(-1, 6)


def _contents(kinds: list[_Kind], meetings: list[Meeting], cls: Ints, classes: int, order: Ints) -> tuple[Boxes, Ints]:
    count = [len(m.row) for m in meetings]
    start = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    entry_box, entry_param = [], []
    for kind, first, size in zip(kinds, start, count, strict=False):
        entry_box.append(np.tile(np.arange(first, first + size), len(kind.members)))
        entry_param.append(np.repeat(np.array(kind.members, np.int64), size))
    box = np.concatenate(entry_box) if entry_box else np.zeros(0, np.int64)
    param = np.concatenate(entry_param) if entry_param else np.zeros(0, np.int64)
    # class, then layer order, then place in the destination: one integer to sort by
    key = (cls[box] * len(order) + order[param]) * max(int(start[-1]), 1) + box if len(box) else box
    sort = np.argsort(key, kind="stable")
    box, param = box[sort], param[sort]
    pointer = np.searchsorted(cls[box], np.arange(classes + 1))
    columns = [np.concatenate([m[i] for m in meetings]) if meetings else np.zeros(0, np.int64) for i in range(2, 10)]
    widths = [np.full(size, itemsize(kind.spec.dtype), np.int64) for kind, size in zip(kinds, count, strict=True)]
    width = np.concatenate(widths) if widths else np.zeros(0, np.int64)
    row, col, rows, cols, src_offset, src_pitch, dst_offset, dst_pitch = columns
    boxes = Boxes(
        row, col, rows, cols, src_offset, src_pitch, dst_offset, dst_pitch, width, box.astype(np.int32),
        param.astype(np.int32), pointer.astype(np.int64),
    )  # fmt: skip
    return boxes, order[param[pointer[:-1]]] if len(param) else np.zeros(0, np.int64)
