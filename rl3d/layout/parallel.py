"""Layouts and meshes: the one grammar for parallel layouts and the arithmetic between ranks and coordinates.

A layout is written ``tp2.pp2.dp4.zero1`` wherever rl3d accepts one: fields separated by dots, in any order, each at
most once; ``dp`` is derived from the world size when left out.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

AXES = ("tp", "pp", "dp")


class LayoutError(ValueError):
    """A layout that cannot exist: the message names the layout, the number that is off and the remedy."""


class Coord(NamedTuple):
    """Position of one rank in a training mesh."""

    tp: int
    pp: int
    dp: int


def _fields(text: str, allowed: Iterable[str], kind: str) -> dict[str, int]:
    allowed = tuple(allowed)
    example = "tp2.pp2.zero1" if "pp" in allowed else "tp4"
    found: dict[str, int] = {}
    for part in str(text).strip().split("."):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in allowed:
            raise LayoutError(
                f"{kind} layout {text!r}: cannot read {part!r}; expected fields {', '.join(allowed)} with a number, "
                f"joined by dots, for example {example!r}"
            )
        if match[1] in found:
            raise LayoutError(f"{kind} layout {text!r}: {match[1]} is given twice; give it once")
        found[match[1]] = int(match[2])
    for name, value in found.items():
        if name != "zero" and value < 1:
            raise LayoutError(f"{kind} layout {text!r}: {name}{value} must be at least 1")
    return found


@dataclass(frozen=True)
class TrainLayout:
    """Training layout: tensor, pipeline and data parallel sizes and the ZeRO stage (0-3).

    ``dp`` is ``None`` until :meth:`resolve` derives it from the number of ranks. ``vpp`` is the number of chunks of
    layers that each pipeline stage holds; above 1 the stages are interleaved, which needs ``pp`` above 1.
    """

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    zero: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"training layout {self}: vpp{self.vpp} interleaves the stages of a pipeline, but there is one stage; "
                f"drop vpp{self.vpp} or write pp2 or more"
            )

    @classmethod
    def parse(cls, text: str) -> "TrainLayout":
        """Read ``tp2.pp2.dp1.zero1`` or ``tp2.pp2.vpp2.zero1``. Raises :class:`LayoutError` on anything else."""
        found = _fields(text, ("tp", "pp", "vpp", "dp", "zero"), "training")
        if found.get("zero", 1) > 3:
            raise LayoutError(f"training layout {text!r}: zero{found['zero']} does not exist; use zero0, 1, 2 or 3")
        return cls(**found)

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model: tp x pp."""
        return self.tp * self.pp

    def resolve(self, world_size: int) -> "TrainLayout":
        """The same layout with ``dp`` filled in. Raises :class:`LayoutError` when the ranks do not divide."""
        if self.dp is None:
            if world_size % self.model_parallel:
                raise LayoutError(
                    f"training layout {self}: {world_size} ranks do not divide by tp x pp = {self.model_parallel}; "
                    f"start a multiple of {self.model_parallel} ranks or change layout.train"
                )
            return replace(self, dp=world_size // self.model_parallel)
        if self.dp * self.model_parallel != world_size:
            raise LayoutError(
                f"training layout {self} needs tp x pp x dp = {self.dp * self.model_parallel} ranks, but there are "
                f"{world_size}; leave dp out to derive it, or start {self.dp * self.model_parallel} ranks"
            )
        return self

    def __str__(self) -> str:
        dp = "" if self.dp is None else f".dp{self.dp}"
        vpp = "" if self.vpp == 1 else f".vpp{self.vpp}"
        return f"tp{self.tp}.pp{self.pp}{vpp}{dp}.zero{self.zero}"


@dataclass(frozen=True)
class GenLayout:
    """Generation layout: tensor parallel only; every other rank is a replica."""

    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "GenLayout":
        """Read ``tp4``. Raises :class:`LayoutError` on anything else."""
        return cls(**_fields(text, ("tp",), "generation"))

    def replicas(self, world_size: int) -> int:
        """Number of model copies on ``world_size`` ranks. Raises :class:`LayoutError` when they do not divide."""
        if world_size % self.tp:
            raise LayoutError(
                f"generation layout {self}: {world_size} ranks do not divide by tp = {self.tp}; "
                f"choose layout.gen among the divisors of {world_size}"
            )
        return world_size // self.tp

    def __str__(self) -> str:
        return f"tp{self.tp}"


def check_order(order: Sequence[str]) -> None:
    """Raise :class:`LayoutError` unless ``order`` names every axis once, parts of an axis before the rest of it."""
    seen: set[str] = set()
    for name in order:
        match = re.fullmatch(r"(tp|pp|dp)(?::([1-9]\d*))?", name)
        if match is None or match[1] in seen:
            break
        if match[2] is None:
            seen.add(match[1])
    else:
        if len(seen) == len(AXES):
            return
    raise LayoutError(
        f"mesh order {'-'.join(order)!r}: expected tp, pp and dp in some order, as in tp-pp-dp; an axis may be split, "
        "as in dp:2-tp-pp-dp, with the rest of it behind"
    )


@dataclass(frozen=True)
class Mesh:
    """Ranks of a training layout as a three-dimensional grid.

    ``order`` lists the axes from the fastest varying to the slowest; rank 0 sits at (0, 0, 0). An axis may be split: in
    ``("dp:2", "tp", "pp", "dp")`` neighbouring pairs of ranks differ in the last binary digit of dp, and what is left of
    dp varies slowest. Whatever the order, indices rise with ranks inside a group. The order inside a node is ours to
    choose: it decides how much of what a rank trains it also generates with.
    """

    tp: int
    pp: int
    dp: int
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        check_order(self.order)
        left = {axis: getattr(self, axis) for axis in AXES}
        for name in self.order:
            axis, split, size = name.partition(":")
            if split and left[axis] % int(size):
                raise LayoutError(f"mesh order {self.order!r}: {name!r} does not divide {axis} = {getattr(self, axis)}")
            left[axis] //= int(size) if split else 1

    @classmethod
    def of(cls, layout: TrainLayout, world_size: int, order: tuple[str, ...] = AXES) -> "Mesh":
        """The mesh of a training layout on ``world_size`` ranks."""
        resolved = layout.resolve(world_size)
        assert resolved.dp is not None
        return cls(resolved.tp, resolved.pp, resolved.dp, order)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @cached_property
    def digits(self) -> tuple[tuple[str, int, int, int], ...]:
        """(axis, size, stride among ranks, weight in the axis's index) of every part of every axis."""
        out, stride, weight = [], 1, dict.fromkeys(AXES, 1)
        for name in self.order:
            axis, split, size = name.partition(":")
            count = int(size) if split else getattr(self, axis) // weight[axis]
            out.append((axis, count, stride, weight[axis]))
            stride *= count
            weight[axis] *= count
        return tuple(out)

    def coords(self, rank: int) -> Coord:
        """Coordinates of a global rank. Raises :class:`LayoutError` outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        found = dict.fromkeys(AXES, 0)
        for axis, size, stride, weight in self.digits:
            found[axis] += rank // stride % size * weight
        return Coord(**found)

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Global rank at a coordinate."""
        index = {"tp": tp, "pp": pp, "dp": dp}
        return sum(index[axis] // weight % size * stride for axis, size, stride, weight in self.digits)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ in ``axes`` only; each ascending, ordered by first rank."""
        keep = [axis for axis in AXES if axis not in axes]
        buckets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coord = self.coords(rank)
            buckets.setdefault(tuple(getattr(coord, axis) for axis in keep), []).append(rank)
        return tuple(sorted(tuple(sorted(group)) for group in buckets.values()))


@dataclass(frozen=True)
class GenMesh:
    """Ranks of a generation layout: consecutive runs of ``tp`` entries of ``ranks`` form one replica.

    ``ranks`` must rise: process groups sort their members and megatron-core takes the position as the slot.
    """

    tp: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) % self.tp or list(self.ranks) != sorted(set(self.ranks)):
            raise LayoutError(
                f"generation mesh: {len(self.ranks)} ranks {self.ranks} must be rising, without repeats, and a multiple "
                f"of tp = {self.tp}"
            )

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.tp

    def coords(self, rank: int) -> tuple[int, int]:
        """(replica, slot) of a global rank. Raises :class:`LayoutError` when the rank takes no part."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not among the generation ranks {self.ranks}")
        return divmod(self.ranks.index(rank), self.tp)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Tensor-parallel groups, one per replica."""
        return tuple(self.ranks[i : i + self.tp] for i in range(0, len(self.ranks), self.tp))
