"""Shards: the distinct parts of a parameter, who holds them and where they lie in a local tensor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl3d.layout.parallel import LayoutError
from rl3d.layout.regions import Box, Holding, flat_interval, matrix_shape
from rl3d.layout.spec import ParamSpec

_ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype name. Raises :class:`LayoutError` for one that is not known."""
    if dtype not in _ITEMSIZE:
        raise LayoutError(f"dtype {dtype!r} is not known; expected one of {', '.join(sorted(_ITEMSIZE))}")
    return _ITEMSIZE[dtype]


class Cell(NamedTuple):
    """One part of a parameter before any box is computed: elements ``start`` to ``stop`` of a TP-local tensor.

    Attributes:
        tp: number of tensor-parallel shards of the parameter.
        slot: which of them; 0 for a parameter that is not cut.
        start, stop: flat elements of the TP-local tensor; may be empty (a flat shard of padding only).
        length: elements of the local tensor that holds the part; ``None`` when that is the whole TP-local tensor.
        ranks: global ranks that hold it, ascending.
    """

    tp: int
    slot: int
    start: int
    stop: int
    length: int | None
    ranks: tuple[int, ...]

    def shard(self, spec: ParamSpec) -> "Shard":
        """The boxes of this part."""
        real, pads = tp_holdings(spec, self.tp, self.slot)
        total = math.prod(spec.local_shape(self.tp))
        if (self.start, self.stop, self.length) == (0, total, None):
            return Shard(self.ranks, real, pads)
        shift = 0 if self.length is not None else self.start
        held, empty = (
            [x._replace(offset=x.offset + shift) for h in group for x in flat_interval(h, self.start, self.stop)]
            for group in (real, pads)
        )
        if self.length is not None and self.stop - self.start < self.length:
            tail = self.length - (self.stop - self.start)
            empty.append(Holding(Box(matrix_shape(spec.shape)[0], 0, 1, tail), self.stop - self.start, tail))
        return Shard(self.ranks, tuple(held), tuple(empty))


@dataclass(frozen=True)
class Shard:
    """Identical copies of one part of a parameter; the shards of a parameter are disjoint.

    Attributes:
        ranks: global ranks that hold it, ascending.
        holdings: the real values, as disjoint boxes of the global matrix with their local positions.
        pads: local positions of padding (boxes beyond ``valid_rows`` or the end): filled with zeros, never moved.
    """

    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]
    pads: tuple[Holding, ...] = ()


@dataclass(frozen=True)
class Atom:
    """A box of a parameter that has one set of holders.

    ``holders`` ascend; ``place`` maps each to the holding of its local tensor that contains the box.
    """

    box: Box
    holders: tuple[int, ...]
    place: Mapping[int, Holding]

    def at(self, rank: int) -> Holding:
        """Where this atom lies in ``rank``'s local tensor."""
        held = self.place[rank]
        return Holding(self.box, held.locate(self.box), held.pitch)


def make_atoms(shards: Sequence[Shard]) -> Iterator[Atom]:
    """Every real box of a parameter once; shards are disjoint, so each of their boxes is an atom."""
    for shard in shards:
        for holding in shard.holdings:
            yield Atom(holding.box, shard.ranks, dict.fromkeys(shard.ranks, holding))


def tp_holdings(spec: ParamSpec, tp: int, index: int) -> tuple[tuple[Holding, ...], tuple[Holding, ...]]:
    """Boxes of one tensor-parallel shard, split into real rows and padding rows."""
    rows, cols = matrix_shape(spec.shape)
    local = spec.local_shape(tp)
    pitch = matrix_shape(local)[1]
    if spec.dim is None:
        boxes = [Holding(Box(0, 0, rows, cols), 0, pitch)]
    elif spec.dim == 0:
        boxes = [Holding(Box(p.global_start, 0, p.length, cols), p.local_start * pitch, pitch)
                 for p in spec.pieces(tp, index)]  # fmt: skip
    elif spec.dim == 1:
        inner = matrix_shape(spec.shape[1:])[1]
        boxes = [Holding(Box(0, p.global_start * inner, rows, p.length * inner), p.local_start * inner, pitch)
                 for p in spec.pieces(tp, index)]  # fmt: skip
    else:
        raise LayoutError(f"{spec.name}: dimension {spec.dim} is cut; only dimensions 0 and 1 can be")
    boxes = _join(boxes)
    valid = rows if spec.valid_rows is None else spec.valid_rows
    real: list[Holding] = []
    pads: list[Holding] = []
    for holding in boxes:
        for band, out in ((Box(0, 0, valid, cols), real), (Box(valid, 0, rows - valid, cols), pads)):
            part = holding.box.intersect(band)
            if part is not None:
                out.append(Holding(part, holding.locate(part), pitch))
    return tuple(real), tuple(pads)


def _join(boxes: list[Holding]) -> list[Holding]:
    """Neighbouring blocks that touch both globally and locally (every block at tp = 1) become one box."""
    out = boxes[:1]
    for nxt in boxes[1:]:
        last = out[-1]
        box, add = last.box, nxt.box
        below = (add.row, add.col, add.cols) == (box.row + box.rows, box.col, box.cols)
        right = (add.row, add.col, add.rows) == (box.row, box.col + box.cols, box.rows)
        if below and nxt.offset == last.offset + box.rows * last.pitch:
            out[-1] = last._replace(box=box._replace(rows=box.rows + add.rows))
        elif right and nxt.offset == last.offset + box.cols:
            out[-1] = last._replace(box=box._replace(cols=box.cols + add.cols))
        else:
            out.append(nxt)
    return out
