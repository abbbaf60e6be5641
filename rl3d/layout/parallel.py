"""Layouts and meshes: the one grammar for parallel layouts and the arithmetic between ranks and coordinates.

A layout is written ``tp2.pp2.dp4.zero1`` wherever rl3d accepts one: fields separated by dots, in any order, each at
most once; ``dp`` is derived from the world size when left out.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Mesh:
    """Ranks of a training layout as a three-dimensional grid.

    ``order`` lists the axes from the fastest varying to the slowest; rank 0 sits at (0, 0, 0). The order inside a
    node is ours to choose: it decides how much of what a rank trains it also generates with.
    """

    tp: int
    pp: int
    dp: int
    order: tuple[str, str, str] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise LayoutError(f"mesh order {self.order!r} must be a permutation of {AXES!r}")

    @classmethod
    def of(cls, layout: TrainLayout, world_size: int, order: tuple[str, str, str] = AXES) -> "Mesh":
        """The mesh of a training layout on ``world_size`` ranks."""
        resolved = layout.resolve(world_size)
        assert resolved.dp is not None
        return cls(resolved.tp, resolved.pp, resolved.dp, order)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def _stride(self, axis: str) -> int:
        return math.prod(getattr(self, name) for name in self.order[: self.order.index(axis)])

    def coords(self, rank: int) -> Coord:
        """Coordinates of a global rank. Raises :class:`LayoutError` outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        return Coord(*(rank // self._stride(axis) % getattr(self, axis) for axis in AXES))

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Global rank at a coordinate."""
        return sum(value * self._stride(axis) for axis, value in zip(AXES, (tp, pp, dp), strict=True))

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
