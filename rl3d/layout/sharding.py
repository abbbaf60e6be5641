"""Shard layouts: which rank holds which boxes of which parameter, and where in its local tensor.

A layout answers one question, :meth:`ShardLayout.shards`; planner, executor and fingerprints ask nothing else.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl3d.layout.parallel import GenMesh, LayoutError, Mesh, TrainLayout
from rl3d.layout.regions import Box, Holding, cut_atoms, flat_interval, matrix_shape
from rl3d.layout.spec import ParamSpec
from rl3d.layout.stages import stage_layers

_ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype name. Raises :class:`LayoutError` for one that is not known."""
    if dtype not in _ITEMSIZE:
        raise LayoutError(f"dtype {dtype!r} is not known; expected one of {', '.join(sorted(_ITEMSIZE))}")
    return _ITEMSIZE[dtype]


def count_layers(specs: Iterable[ParamSpec]) -> int:
    """Number of transformer layers that the specifications speak of."""
    return max((spec.layer + 1 for spec in specs if spec.layer is not None), default=0)


@dataclass(frozen=True)
class Shard:
    """Identical copies of one part of a parameter.

    Attributes:
        ranks: global ranks that hold it, ascending.
        holdings: the real values, as disjoint boxes of the global matrix with their local positions.
        pads: local positions of padding rows (boxes beyond ``valid_rows``): filled with zeros, never moved.
    """

    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]
    pads: tuple[Holding, ...] = ()


@dataclass(frozen=True)
class Atom:
    """The largest box of a parameter that has one set of holders.

    ``holders`` ascend; ``place`` maps each to the holding of its local tensor that contains the box.
    """

    box: Box
    holders: tuple[int, ...]
    place: Mapping[int, Holding]

    def at(self, rank: int) -> Holding:
        """Where this atom lies in ``rank``'s local tensor."""
        held = self.place[rank]
        return Holding(self.box, held.locate(self.box), held.pitch)


class Place(NamedTuple):
    """Position of a rank in a layout: pipeline stage, tensor-parallel index, index of its flat part (ZeRO-3: dp rank)."""

    stage: int
    tp: int
    part: int = 0


class ShardLayout:
    """A whole model over ranks: tensor parallel inside a stage, layers over stages, flat parts or replicas for the rest.

    Covers training at ZeRO stages 0-2 (16-bit parameters are whole TP-local tensors on every DP rank), at stage 3 (each
    TP-local tensor is cut into flat parts of equal length, one per DP rank, the last ones padded) and generation (one
    stage).
    """

    def __init__(
        self,
        name: str,
        tp: int,
        layers: Sequence[Sequence[int]],
        places: Mapping[int, tuple[int, ...]],
        *,
        parts: int | None = None,
    ) -> None:
        """``places`` maps each global rank to a :class:`Place`; ``layers`` is per stage.

        ``parts`` is the number of flat parts that every TP-local tensor is cut into; ``None`` keeps it whole.
        """
        self.name = name
        self.tp = tp
        self.layers = tuple(layers)
        self.parts = parts
        self.places = {rank: Place(*place) for rank, place in sorted(places.items())}
        self._members: dict[Place, list[int]] = {}
        for rank, place in self.places.items():
            self._members.setdefault(place, []).append(rank)
        self._shards: dict[tuple, tuple[Shard, ...]] = {}
        self._atoms: dict[int, tuple[Atom, ...]] = {}

    @classmethod
    def training(cls, mesh: Mesh, num_layers: int, *, zero: int = 1, vpp: int = 1) -> "ShardLayout":
        """Layout of the 16-bit parameters of a training mesh.

        At ZeRO stage 3 the local tensor of a parameter is flat, ``ceil(TP-local elements / dp)`` long, and DP rank ``r``
        holds the elements from ``r`` times that on (DeepSpeed's ``ds_tensor``). Raises :class:`LayoutError` for a stage
        that does not exist.
        """
        name = str(TrainLayout(mesh.tp, mesh.pp, mesh.dp, zero, vpp))
        if zero not in (0, 1, 2, 3):
            raise LayoutError(f"training layout {name}: zero{zero} does not exist; use zero0, 1, 2 or 3")
        coords = {rank: mesh.coords(rank) for rank in range(mesh.world_size)}
        layers = stage_layers(num_layers, mesh.pp, vpp)
        flat = zero == 3
        places = {r: Place(c.pp, c.tp, c.dp if flat else 0) for r, c in coords.items()}
        return cls(name, mesh.tp, layers, places, parts=mesh.dp if flat else None)

    @classmethod
    def generation(cls, mesh: GenMesh, num_layers: int) -> "ShardLayout":
        """Layout of a generation mesh: every replica holds all layers, ranks outside ``mesh.ranks`` nothing."""
        return cls.replicas(mesh.tp, mesh.groups(), num_layers)

    @classmethod
    def replicas(cls, tp: int, groups: Sequence[Sequence[int]], num_layers: int) -> "ShardLayout":
        """Whole models on ``groups`` of ``tp`` ranks each, consecutive or not; slots rise with rank in a group.

        Raises :class:`LayoutError` for a group of another size, one that does not rise, or a rank in two groups.
        """
        places: dict[int, Place] = {}
        for group in groups:
            if len(group) != tp or list(group) != sorted(set(group)) or places.keys() & set(group):
                raise LayoutError(
                    f"generation group {tuple(group)} must be {tp} rising ranks that are in no other group: process "
                    "groups sort their ranks and the position is the slot"
                )
            places |= {rank: Place(0, slot) for slot, rank in enumerate(group)}
        return cls(f"tp{tp}x{len(groups)}", tp, (range(num_layers),), places)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.places)

    def local_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Shape of the local tensor on every rank that holds ``spec``."""
        shape = spec.local_shape(self.tp)
        return shape if self.parts is None else (-(-math.prod(shape) // self.parts),)

    def holds(self, spec: ParamSpec, rank: int) -> bool:
        """Whether ``rank`` has a local tensor for ``spec``."""
        return rank in self.places and spec.on_stage(self.places[rank][0], self.layers)

    def shards(self, spec: ParamSpec) -> tuple[Shard, ...]:
        """All distinct parts of a parameter with their holders. Equal parameters get the very same object.

        Raises :class:`LayoutError` when a dimension does not divide by tp or no stage holds the parameter.
        """
        stages = tuple(s for s in range(len(self.layers)) if spec.on_stage(s, self.layers))
        if not stages:
            raise LayoutError(
                f"{spec.name}: layer {spec.layer} / place {spec.place!r} is on none of the {len(self.layers)} stages "
                f"of layout {self.name}"
            )
        key = (spec.shape, spec.dim, spec.blocks, spec.valid_rows, stages)
        if key not in self._shards:
            self._shards[key] = tuple(self._make_shards(spec, stages))
        return self._shards[key]

    def atoms(self, spec: ParamSpec) -> tuple[Atom, ...]:
        """The real values of a parameter, cut so that every rank holds an atom entirely or not at all."""
        shards = self.shards(spec)
        if id(shards) not in self._atoms:
            self._atoms[id(shards)] = tuple(_make_atoms(shards))
        return self._atoms[id(shards)]

    def _make_shards(self, spec: ParamSpec, stages: tuple[int, ...]) -> Iterable[Shard]:
        slots = range(self.tp) if spec.dim is not None else (None,)
        for slot in slots:
            real, pads = _tp_holdings(spec, self.tp, slot or 0)
            tps = range(self.tp) if slot is None else (slot,)
            for part in range(self.parts or 1):
                places = [Place(stage, tp, part) for stage in stages for tp in tps]
                ranks = sorted({r for place in places for r in self._members.get(place, ())})
                if ranks:
                    yield Shard(tuple(ranks), *(self._flat(spec, part, real, pads) if self.parts else (real, pads)))

    def _flat(
        self, spec: ParamSpec, part: int, real: tuple[Holding, ...], pads: tuple[Holding, ...]
    ) -> tuple[tuple[Holding, ...], tuple[Holding, ...]]:
        """The elements of a TP-local tensor that are in flat part ``part``, and the padding in and behind them."""
        total, (length,) = math.prod(spec.local_shape(self.tp)), self.local_shape(spec)
        start, stop = min(part * length, total), min((part + 1) * length, total)
        held, empty = ([x for whole in part_of for x in flat_interval(whole, start, stop)] for part_of in (real, pads))
        if stop - start < length:
            tail = length - (stop - start)
            empty.append(Holding(Box(matrix_shape(spec.shape)[0], 0, 1, tail), stop - start, tail))
        return tuple(held), tuple(empty)

    def holdings(self, rank: int, specs: Iterable[ParamSpec]) -> dict[str, tuple[Holding, ...]]:
        """Name -> boxes of ``rank``'s local tensor, for every parameter that it holds."""
        found = {}
        for spec in specs:
            if self.holds(spec, rank):
                found[spec.name] = next(shard.holdings for shard in self.shards(spec) if rank in shard.ranks)
        return found


def _make_atoms(shards: Sequence[Shard]) -> Iterator[Atom]:
    for index, shard in enumerate(shards):
        for holding in shard.holdings:
            for box, owners in cut_atoms(holding.box, [s.holdings for s in shards]):
                if owners[0][0] == index:  # an atom in several shards is listed once, with the first of them
                    place = {rank: held for i, held in reversed(owners) for rank in shards[i].ranks}
                    yield Atom(box, tuple(sorted(place)), place)


def _tp_holdings(spec: ParamSpec, tp: int, index: int) -> tuple[tuple[Holding, ...], tuple[Holding, ...]]:
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
