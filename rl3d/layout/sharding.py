"""Shard layouts: which rank holds which boxes of which parameter, and where in its local tensor.

A layout answers one question, :meth:`ShardLayout.cells` with the boxes in :meth:`ShardLayout.shards`; planner, executor
and fingerprints ask nothing else.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rl3d.layout.experts import ExpertGrid
from rl3d.layout.parallel import GenMesh, LayoutError, Mesh, TrainLayout
from rl3d.layout.regions import Holding
from rl3d.layout.shards import Atom, Cell, Shard, make_atoms
from rl3d.layout.spec import ParamSpec
from rl3d.layout.stages import stage_layers


def count_layers(specs: Iterable[ParamSpec]) -> int:
    """Number of transformer layers that the specifications speak of."""
    return max((spec.layer + 1 for spec in specs if spec.layer is not None), default=0)


class Place(NamedTuple):
    """Position of a rank: pipeline stage, tensor-parallel index, flat part (the DP rank), seat in the expert grid."""

    stage: int
    tp: int
    part: int = 0
    seat: int = 0


class Flat(NamedTuple):
    """DeepSpeed's flat buffers at ZeRO stages 1 and 2: where each parameter starts, and how long a rank's slice is."""

    offset: dict[tuple[int, str], int]
    """(stage, name) -> first element in its group's flat buffer."""
    length: dict[tuple[int, str], int]
    """(stage, name) -> elements of the group's slice of one DP rank."""


class ShardLayout:
    """A whole model over ranks: tensor parallel inside a stage, layers over stages, flat parts or replicas for the rest.

    Four kinds, each with a constructor: :meth:`training` at ZeRO stages 0-2 (16-bit parameters are whole TP-local tensors
    on every DP rank) and at stage 3 (flat shards of each tensor), :meth:`partitions` (what a DP rank has updated before
    the all-gather of stages 1 and 2) and :meth:`replicas` (generation).
    """

    def __init__(
        self,
        name: str,
        tp: int,
        layers: Sequence[Sequence[int]],
        places: Mapping[int, tuple[int, ...]],
        *,
        parts: int | None = None,
        experts: ExpertGrid | None = None,
        flat: Flat | None = None,
    ) -> None:
        """``places`` maps each global rank to a :class:`Place`; ``layers`` is per stage.

        ``parts`` is the number of flat parts that every TP-local tensor is cut into (ZeRO-3); ``None`` keeps it whole.
        ``flat`` cuts by optimiser partitions instead.
        """
        self.name = name
        self.tp = tp
        self.layers = tuple(layers)
        self.parts, self.experts, self.flat = parts, experts, flat
        self.places = {rank: Place(*place) for rank, place in sorted(places.items())}
        self._stage_of: dict[int, tuple[int, ...]] = {}
        for stage, held in enumerate(self.layers):
            for layer in held:
                self._stage_of[layer] = (*self._stage_of.get(layer, ()), stage)
        self._groups: dict[tuple, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._cells: dict[tuple, tuple[Cell, ...]] = {}
        self._shards: dict[tuple, tuple[Shard, ...]] = {}
        self._atoms: dict[int, tuple[Atom, ...]] = {}

    @classmethod
    def training(
        cls,
        mesh: Mesh,
        num_layers: int,
        *,
        zero: int = 1,
        vpp: int = 1,
        experts: int = 0,
        ep: int = 1,
        expert_tp: int | None = None,
    ) -> "ShardLayout":
        """Layout of the 16-bit parameters of a training mesh.

        At ZeRO stage 3 the local tensor of a parameter is flat, ``ceil(TP-local elements / dp)`` long, and DP rank ``r``
        holds the elements from ``r`` times that on (DeepSpeed's ``ds_tensor``). A mixture has ``experts`` experts a
        layer over ``ep`` expert-parallel ranks, each cut by ``expert_tp`` (``tp`` when left out); their replicas, and
        flat parts, are the expert-data-parallel ranks.

        Raises:
            LayoutError: a stage that does not exist, experts or ranks that do not divide.
        """
        name = str(TrainLayout(mesh.tp, mesh.pp, mesh.dp, zero, vpp)) + (f".ep{ep}" if ep > 1 else "")
        if zero not in (0, 1, 2, 3):
            raise LayoutError(f"training layout {name}: zero{zero} does not exist; use zero0, 1, 2 or 3")
        grid = ExpertGrid.of(name, mesh.tp * mesh.dp, experts, ep, expert_tp or mesh.tp) if experts else None
        parts = mesh.dp if zero == 3 else None
        layers = stage_layers(num_layers, mesh.pp, vpp)
        return cls(name, mesh.tp, layers, _mesh_places(mesh), parts=parts, experts=grid)

    @classmethod
    def partitions(
        cls,
        mesh: Mesh,
        num_layers: int,
        specs: Sequence[ParamSpec],
        *,
        vpp: int = 1,
        groups: Sequence[Sequence[str]] | None = None,
        zero: int = 1,
    ) -> "ShardLayout":
        """What each DP rank holds freshly updated after an optimiser step at ZeRO stage 1 or 2, before the all-gather.

        DeepSpeed lays the parameters of an optimiser group end to end in one flat buffer, pads its end to a multiple of
        ``2 * dp`` elements and gives DP rank ``r`` slice ``r`` (``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer`` alike;
        not with ``round_robin_gradients`` or ``parameter_alignment``). Parameters are views of the buffer, so local
        tensors are whole TP-local ones of which only the rank's slice is valid; as a destination, only it is written.

        Args:
            specs: all parameters of the model.
            groups: canonical names of each optimiser group, in the module's order; one group in the order of ``specs``
                when left out. The tied embedding of a last stage that is not the first comes last, as ``output_layer``.

        Raises:
            LayoutError: a parameter in no group or in two, a name that is not known, experts.
        """
        name = f"{TrainLayout(mesh.tp, mesh.pp, mesh.dp, zero, vpp)}.partitions"
        layers = stage_layers(num_layers, mesh.pp, vpp)
        order = [[spec.name for spec in specs]] if groups is None else groups
        flat = _flat_buffers(name, mesh, layers, {spec.name: spec for spec in specs}, order)
        return cls(name, mesh.tp, layers, _mesh_places(mesh), flat=flat)

    @classmethod
    def generation(cls, mesh: GenMesh, num_layers: int) -> "ShardLayout":
        """Layout of a generation mesh: every replica holds all layers, ranks outside ``mesh.ranks`` nothing."""
        return cls.replicas(mesh.tp, mesh.groups(), num_layers)

    @classmethod
    def replicas(
        cls, tp: int, groups: Sequence[Sequence[int]], num_layers: int, *, experts: int = 0, ep: int = 1
    ) -> "ShardLayout":
        """Whole models on ``groups`` of ``tp`` ranks each, consecutive or not; slots rise with rank in a group.

        With ``experts``, the ranks of a group hold them over ``ep`` expert-parallel ranks, cut by ``tp / ep``.

        Raises:
            LayoutError: a group of another size, one that does not rise, a rank in two groups, experts that do not
                divide.
        """
        places: dict[int, Place] = {}
        for group in groups:
            if len(group) != tp or list(group) != sorted(set(group)) or places.keys() & set(group):
                raise LayoutError(
                    f"generation group {tuple(group)} must be {tp} rising ranks that are in no other group: process "
                    "groups sort their ranks and the position is the slot"
                )
            places |= {rank: Place(0, slot, 0, slot) for slot, rank in enumerate(group)}
        name = f"tp{tp}x{len(groups)}" + (f".ep{ep}" if ep > 1 else "")
        if tp % ep:
            raise LayoutError(f"layout {name}: tp = {tp} does not divide by ep = {ep}")
        grid = ExpertGrid.of(name, tp, experts, ep, tp // ep) if experts else None
        return cls(name, tp, (range(num_layers),), places, experts=grid)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.places)

    def describe(self) -> list[Any]:
        """Everything that tells this layout from others, as plain data: equal layouts give equal descriptions."""
        flat = None if self.flat is None else [sorted(self.flat.offset.items()), sorted(self.flat.length.items())]
        places = [[rank, *place] for rank, place in self.places.items()]
        return [self.name, self.tp, [list(held) for held in self.layers], places, self.parts, self.experts, flat]

    def local_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Shape of the local tensor on every rank that holds ``spec``."""
        shape, parts = spec.local_shape(self._tp(spec)), self._parts(spec)
        return shape if parts is None else (-(-math.prod(shape) // parts),)

    def stages(self, spec: ParamSpec) -> tuple[int, ...]:
        """Stages that hold a parameter. Raises :class:`LayoutError` when none does."""
        if spec.layer is not None:
            found = self._stage_of.get(spec.layer, ())
        else:
            found = tuple(s for s in range(len(self.layers)) if spec.on_stage(s, self.layers))
        if not found:
            raise LayoutError(
                f"{spec.name}: layer {spec.layer} / place {spec.place!r} is on none of the {len(self.layers)} stages "
                f"of layout {self.name}"
            )
        return found

    def holds(self, spec: ParamSpec, rank: int) -> bool:
        """Whether ``rank`` has a local tensor for ``spec``."""
        if rank not in self.places or not spec.on_stage(self.places[rank].stage, self.layers):
            return False
        grid = self._expert_grid(spec)
        return grid is None or grid.place(self.places[rank].seat)[1] == grid.home(spec.expert or 0)

    def holders(self, spec: ParamSpec) -> tuple[int, ...]:
        """All ranks that have a local tensor for ``spec``, ascending."""
        grouped = self._grouped(self.stages(spec), self._expert_grid(spec), spec.expert)
        return tuple(sorted(rank for ranks in grouped.values() for rank in ranks))

    def cells(self, spec: ParamSpec) -> tuple[Cell, ...]:
        """All distinct parts of a parameter with their holders. Like parameters get the very same object.

        Raises :class:`LayoutError` when a dimension does not divide by tp or no stage holds the parameter.
        """
        stages, grid, whole = self.stages(spec), self._expert_grid(spec), math.prod(spec.local_shape(self._tp(spec)))
        home = None if grid is None else grid.home(spec.expert or 0)
        offsets = None if self.flat is None else tuple(self._slice(stage, spec) for stage in stages)
        key = (stages, home, spec.dim is None, whole, offsets)
        if key not in self._cells:
            grouped = self._grouped(stages, grid, spec.expert)
            self._cells[key] = tuple(self._make_cells(spec, stages, whole, offsets, grouped))
        return self._cells[key]

    def shards(self, spec: ParamSpec) -> tuple[Shard, ...]:
        """The cells with their boxes. Equal parameters get the very same object; raises what :meth:`cells` raises."""
        cells = self.cells(spec)
        key = (spec.shape, spec.dim, spec.blocks, spec.valid_rows, id(cells))
        if key not in self._shards:
            self._shards[key] = tuple(cell.shard(spec) for cell in cells)
        return self._shards[key]

    def atoms(self, spec: ParamSpec) -> tuple[Atom, ...]:
        """The real values of a parameter, cut so that every rank holds an atom entirely or not at all."""
        shards = self.shards(spec)
        if id(shards) not in self._atoms:
            self._atoms[id(shards)] = tuple(make_atoms(shards))
        return self._atoms[id(shards)]

    def holdings(self, rank: int, specs: Iterable[ParamSpec]) -> dict[str, tuple[Holding, ...]]:
        """Name -> boxes of ``rank``'s local tensor, for every parameter that it holds."""
        found = {}
        for spec in specs:
            if self.holds(spec, rank):
                found[spec.name] = tuple(h for s in self.shards(spec) if rank in s.ranks for h in s.holdings)
        return found

    # ---- which part is whose

    def _expert_grid(self, spec: ParamSpec) -> ExpertGrid | None:
        if spec.expert is None:
            return None
        if self.experts is None or spec.expert >= self.experts.experts:
            known = 0 if self.experts is None else self.experts.experts
            raise LayoutError(
                f"{spec.name} belongs to expert {spec.expert}, but layout {self.name} was made for {known} experts; "
                "give it experts=<number of experts>"
            )
        return self.experts

    def _tp(self, spec: ParamSpec) -> int:
        grid = self._expert_grid(spec)
        return self.tp if grid is None else grid.tp

    def _parts(self, spec: ParamSpec) -> int | None:
        grid = self._expert_grid(spec)
        return self.parts if grid is None or self.parts is None else grid.dp

    def _grouped(
        self, stages: tuple[int, ...], grid: ExpertGrid | None, expert: int | None
    ) -> dict[tuple[int, ...], tuple[int, ...]]:
        """(stage, tensor-parallel index, flat part) -> ranks, of the ranks that hold a parameter."""
        home = None if grid is None else grid.home(expert or 0)
        key = (stages, home)
        if key not in self._groups:
            found: dict[tuple[int, ...], list[int]] = {}
            for rank, (stage, tp, part, seat) in self.places.items():
                if grid is not None:
                    tp, ep, part = grid.place(seat)
                    if ep != home:
                        continue
                if stage in stages:
                    found.setdefault((stage, tp, part), []).append(rank)
            self._groups[key] = {place: tuple(ranks) for place, ranks in found.items()}
        return self._groups[key]

    def _slice(self, stage: int, spec: ParamSpec) -> tuple[int, int]:
        """(first element in its flat buffer, elements in a DP rank's slice of that buffer)."""
        assert self.flat is not None
        if (stage, spec.name) not in self.flat.offset:
            raise LayoutError(f"{spec.name}: not among the parameters that layout {self.name} was made for")
        return self.flat.offset[stage, spec.name], self.flat.length[stage, spec.name]

    def _make_cells(
        self,
        spec: ParamSpec,
        stages: tuple[int, ...],
        whole: int,
        offsets: tuple[tuple[int, int], ...] | None,
        grouped: Mapping[tuple[int, ...], tuple[int, ...]],
    ) -> Iterable[Cell]:
        tp, parts = self._tp(spec), self._parts(spec)
        length = None if parts is None else -(-whole // parts)
        found: dict[tuple[int, int, int], list[int]] = {}
        for (stage, slot, part), ranks in grouped.items():
            slot = 0 if spec.dim is None else slot
            for start, stop in self._intervals(stages, stage, part, whole, length, offsets):
                found.setdefault((slot, start, stop), []).extend(ranks)
        for (slot, start, stop), members in sorted(found.items()):
            yield Cell(tp, slot, start, stop, length, tuple(sorted(members)))

    def _intervals(
        self,
        stages: tuple[int, ...],
        stage: int,
        part: int,
        whole: int,
        length: int | None,
        offsets: tuple[tuple[int, int], ...] | None,
    ) -> list[tuple[int, int]]:
        """Flat elements of a TP-local tensor that a rank holds."""
        if offsets is not None:
            # Two stages may cut a tied embedding at different places; cells end where either cuts.
            cuts = {0, whole}
            for offset, size in offsets:
                cuts.update(range(-offset % size, whole, size))
            offset, size = offsets[stages.index(stage)]
            low, high = max(part * size - offset, 0), min((part + 1) * size - offset, whole)
            inside = sorted(c for c in cuts if low <= c <= high)
            return list(zip(inside, inside[1:], strict=False))
        if length is None:
            return [(0, whole)]
        return [(min(part * length, whole), min((part + 1) * length, whole))]


def _mesh_places(mesh: Mesh) -> dict[int, Place]:
    coords = {rank: mesh.coords(rank) for rank in range(mesh.world_size)}
    return {rank: Place(c.pp, c.tp, c.dp, c.tp + mesh.tp * c.dp) for rank, c in coords.items()}


def _flat_buffers(
    name: str,
    mesh: Mesh,
    layers: Sequence[Sequence[int]],
    specs: Mapping[str, ParamSpec],
    groups: Sequence[Sequence[str]],
) -> Flat:
    listed = [parameter for group in groups for parameter in group]
    if sorted(listed) != sorted(specs):
        odd = sorted({p for p in [*listed, *specs] if listed.count(p) != 1 or p not in specs})
        raise LayoutError(f"layout {name}: every parameter must be in one optimiser group, once; look at {odd[:5]}")
    experts = [spec.name for spec in specs.values() if spec.expert is not None]
    if experts:
        raise LayoutError(f"layout {name}: expert parameters such as {experts[0]} have optimiser groups of their own")
    flat = Flat({}, {})
    for stage in range(mesh.pp):
        for group in groups:
            held = [specs[p] for p in group if specs[p].on_stage(stage, layers)]
            if stage > 0:
                held.sort(key=lambda spec: spec.place == "pre+post")  # a stable sort: only the tied embedding moves
            start = 0
            for spec in held:
                flat.offset[stage, spec.name] = start
                start += math.prod(spec.local_shape(mesh.tp))
            unit = 2 * mesh.dp
            padded = -(-start // unit) * unit
            for spec in held:
                flat.length[stage, spec.name] = padded // mesh.dp
    return flat
