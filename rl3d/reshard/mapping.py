"""Which mesh order makes a rank train what it also generates with: exact bytes by arithmetic, no plan is built."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import (
    GenLayout,
    LayoutError,
    Mesh,
    ParamSpec,
    Piece,
    TrainLayout,
    count_layers,
    itemsize,
    stage_layers,
)
from rl3d.layout.parallel import AXES

Order = tuple[str, str, str]


class MeshChoice(NamedTuple):
    """A training mesh order, the stride between the ranks of a generation group, and what the move costs.

    Compares by cost: nodes touched by the widest tensor-parallel group of either mesh, then the bytes that the
    busiest rank receives, then their mean.
    """

    nodes: int
    received_max: int
    received_mean: float
    preference: int
    order: Order
    gen_stride: int

    def gen_groups(self, tp: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Generation groups: rank ``r`` takes slot ``r // gen_stride % tp``."""
        block = self.gen_stride * tp
        return tuple(
            tuple(range(start + i, start + block, self.gen_stride))
            for start in range(0, world_size, block)
            for i in range(self.gen_stride)
        )


def choose_mesh_order(
    specs: Sequence[ParamSpec],
    train: TrainLayout,
    gen: GenLayout,
    world_size: int,
    gpus_per_node: int | None = None,
) -> Order:
    """The axis order of the training mesh, fastest axis first, that moves the least into ``gen``.

    Generation replicas are consecutive ranks. All six orders are compared: first, tensor-parallel groups touch as few
    nodes as possible (with ``gpus_per_node``); then the busiest receiver gets least; then the mean. ("tp", "pp", "dp")
    wins ties. Raises :class:`LayoutError` when the layouts do not fit the world.
    """
    return min(c for c in mesh_choices(specs, train, gen, world_size, gpus_per_node) if c.gen_stride == 1).order


def mesh_choices(
    specs: Sequence[ParamSpec],
    train: TrainLayout,
    gen: GenLayout,
    world_size: int,
    gpus_per_node: int | None = None,
) -> list[MeshChoice]:
    """Every training mesh order with every stride of the generation groups; ``min`` is the best.

    A stride above 1 pays when generation shards are wider than training shards: with TP4 -> TP2 the ranks 0 and 1 both
    train parts of slot 0, so the groups (0, 2), (1, 3) receive less than (0, 1), (2, 3).
    """
    replicas = gen.replicas(world_size)
    resolved = train.resolve(world_size)
    if gpus_per_node is not None and gpus_per_node < 1:
        raise LayoutError(f"gpus_per_node = {gpus_per_node} must be at least 1")

    def span(groups: Sequence[Sequence[int]]) -> int:
        return max(len({rank // gpus_per_node for rank in group}) for group in groups) if gpus_per_node else 1

    need, overlap = _bytes(specs, resolved, gen.tp)
    strides = [n for n in range(1, replicas + 1) if replicas % n == 0]
    found: list[MeshChoice] = []
    for first, second, third in sorted(permutations(AXES), key=lambda order: order != AXES):
        order = (first, second, third)
        mesh = Mesh.of(resolved, world_size, order)
        coords = [mesh.coords(rank) for rank in range(world_size)]
        stages, tps = np.array([c.pp for c in coords]), np.array([c.tp for c in coords])
        train_span = span(mesh.groups("tp"))
        for stride in strides:
            slots = np.arange(world_size) // stride % gen.tp
            received = need[slots] - overlap[stages, tps, slots]
            choice = MeshChoice(0, int(received.max()), float(received.mean()), len(found), order, stride)
            found.append(choice._replace(nodes=max(train_span, span(choice.gen_groups(gen.tp, world_size)))))
    return found


def _bytes(specs: Sequence[ParamSpec], train: TrainLayout, tp_gen: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``need[slot]`` and ``overlap[stage, tp, slot]`` in bytes; equal parameters are counted and multiplied."""
    tp, pp = train.tp, train.pp
    layers = stage_layers(count_layers(specs), pp, train.vpp)
    stage_of = {layer: stage for stage, part in enumerate(layers) for layer in part}
    kinds: Counter[tuple] = Counter()
    for spec in specs:
        if spec.layer is not None:
            stages: tuple[int, ...] = (stage_of[spec.layer],)
        else:
            stages = tuple(s for s in range(pp) if spec.on_stage(s, layers))
        kinds[spec.shape, spec.dim, spec.blocks, spec.valid_rows, spec.dtype, stages] += 1
    need, overlap = np.zeros(tp_gen, np.int64), np.zeros((pp, tp, tp_gen), np.int64)
    for (shape, dim, blocks, valid_rows, dtype, stages), count in kinds.items():
        spec = ParamSpec("any", shape, dim, blocks, dtype=dtype, valid_rows=valid_rows)
        valid = shape[0] if valid_rows is None else valid_rows
        width = itemsize(dtype) * count
        for slot in range(tp_gen):
            if dim is None:
                full = spec.numel // shape[0] * valid * width
                need[slot] += full
                overlap[list(stages), :, slot] += full
                continue
            limit = valid if dim == 0 else shape[dim]
            across = spec.numel // shape[dim] * (valid if dim else 1) // (shape[0] if dim else 1) * width
            wanted = spec.pieces(tp_gen, slot)
            need[slot] += across * _common(wanted, wanted, limit)
            for index in range(tp):
                overlap[list(stages), index, slot] += across * _common(wanted, spec.pieces(tp, index), limit)
    return need, overlap


def _common(a: Sequence[Piece], b: Sequence[Piece], limit: int) -> int:
    """Indices below ``limit`` that lie in both lists of disjoint runs."""
    return sum(
        max(0, min(x.global_start + x.length, y.global_start + y.length, limit) - max(x.global_start, y.global_start))
        for x in a
        for y in b
    )
