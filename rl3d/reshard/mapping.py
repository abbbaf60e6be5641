"""Which rank trains what, and which slot it generates with: exact bytes by arithmetic, no plan is built.

Candidates are orders of the training mesh (an axis may be split in two) and assignments of generation slots; each is
priced with the classes of bytes of a small canonical move. Slots rise with rank inside every group, because process groups
sort their members.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import GenLayout, LayoutError, Mesh, ParamSpec, ShardLayout, TrainLayout, count_layers
from rl3d.layout.parallel import AXES
from rl3d.reshard.assignment import assign_slots
from rl3d.reshard.boxes import Ints, distinct
from rl3d.reshard.traffic import find_traffic

Order = tuple[str, ...]


class MeshChoice(NamedTuple):
    """A training mesh order, the generation slots of the ranks, and what the move costs.

    Compares by cost: nodes touched by the widest tensor-parallel group of either mesh, then the bytes that enter the
    busiest node, then the bytes that the busiest rank receives, then their mean. ``gen_stride`` is the distance between
    the ranks of a generation group; 0 where ``groups`` lists them one by one.
    """

    nodes: int
    ingress: int
    received_max: int
    received_mean: float
    preference: int
    order: Order
    gen_stride: int
    groups: tuple[tuple[int, ...], ...] = ()

    def gen_groups(self, tp: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Generation groups; with a stride, rank ``r`` takes slot ``r // gen_stride % tp``."""
        return self.groups or _tuples(_strided(np.arange(world_size), tp, self.gen_stride))


def _strided(ranks: Ints, tp: int, stride: int) -> Ints:
    """One group a line."""
    return ranks.reshape(-1, tp, stride).transpose(0, 2, 1).reshape(-1, tp)


def choose_mesh_order(
    specs: Sequence[ParamSpec],
    train: TrainLayout,
    gen: GenLayout,
    world_size: int,
    gpus_per_node: int | None = None,
) -> Order:
    """The best of :func:`mesh_choices` where generation replicas are consecutive ranks."""
    return min(c for c in mesh_choices(specs, train, gen, world_size, gpus_per_node) if c.gen_stride == 1).order


def mesh_choices(
    specs: Sequence[ParamSpec],
    train: TrainLayout,
    gen: GenLayout,
    world_size: int,
    gpus_per_node: int | None = None,
    *,
    orders: Sequence[Order] | None = None,
    ranks: Sequence[int] | None = None,
) -> list[MeshChoice]:
    """Training mesh orders with generation groups; ``min`` is the best, ties go to the usual order and small strides.

    A stride above 1 pays when generation shards are wider than training shards: with TP4 -> TP2 the ranks 0 and 1 both
    train parts of slot 0, so the groups (0, 2), (1, 3) receive less than (0, 1), (2, 3). Splitting an axis pays when they
    are narrower: with TP4 -> TP8 two ranks of one training shard should be neighbours. Where no stride suits, slots are
    assigned within blocks of ranks: least received by the busiest, then least in all.

    Args:
        specs: the model's parameters.
        train, gen: the two layouts.
        world_size: number of ranks.
        gpus_per_node: consecutive ranks that share a node; ``None`` is one node.
        orders: mesh orders to consider instead of all.
        ranks: ranks that generate; all when left out.

    Raises:
        LayoutError: layouts that do not fit the ranks or the model.
    """
    taking = np.arange(world_size) if ranks is None else np.array(sorted(ranks), np.int64)
    if not len(taking) or (np.diff(taking) == 0).any() or taking[0] < 0 or taking[-1] >= world_size:
        raise LayoutError(
            f"generation ranks {tuple(taking.tolist())}: expected different ranks below {world_size}, at least one"
        )
    replicas = gen.replicas(len(taking))
    resolved = train.resolve(world_size)
    if gpus_per_node is not None and gpus_per_node < 1:
        raise LayoutError(f"gpus_per_node = {gpus_per_node} must be at least 1")
    prices = _Prices(specs, resolved, gen.tp)
    node_of = np.arange(world_size) // (gpus_per_node or max(world_size, 1))
    strides = [n for n in range(1, replicas + 1) if replicas % n == 0]
    found: list[MeshChoice] = []
    meshes: dict[bytes, tuple[Mesh, Ints, int]] = {}
    for order in _orders(resolved) if orders is None else orders:
        mesh = Mesh.of(resolved, world_size, tuple(order))
        place = prices.places(mesh)
        meshes.setdefault(place.tobytes(), (mesh, place, _train_span(mesh, node_of)))
    # A wider group than need be cannot win.
    narrow = max(min(span for *_, span in meshes.values()), -(-gen.tp // (gpus_per_node or world_size)))
    for mesh, place, span in meshes.values():
        if span > narrow:
            continue
        cost = prices.need[None, :] - prices.overlap[place[taking]]

        def add(slots: Ints, stride: int, groups: Ints, *, where=(mesh, place, span, cost)) -> None:
            mesh, place, span, cost = where
            received = cost[np.arange(len(taking)), slots]
            widest = max(span, _span(groups, node_of))
            enters = prices.ingress(place, node_of, taking, slots)
            kept = _tuples(groups) if stride == 0 or ranks is not None else ()
            found.append(
                MeshChoice(widest, enters, int(received.max()), float(received.mean()), len(found), mesh.order, stride, kept)
            )

        for stride in strides:
            add(np.arange(len(taking)) // stride % gen.tp, stride, _strided(taking, gen.tp, stride))
        least = int(cost.min(axis=1).max(initial=0))
        if min(c.received_max for c in found) > least:
            slots = assign_slots(cost, _block(len(taking), gen.tp, gpus_per_node), gen.tp)
            if slots is not None:
                add(slots, 0, _groups(taking, slots, gen.tp))
    return found


def _orders(train: TrainLayout) -> Iterator[Order]:
    """The usual order first, then the other permutations, then those with one axis split in two."""
    yield from sorted(permutations(AXES), key=lambda order: order != AXES)
    for axis in AXES:
        size = getattr(train, axis)
        for part in (n for n in range(2, size) if size % n == 0):
            low = f"{axis}:{part}"
            for order in permutations((*AXES, low)):
                if order.index(axis) > order.index(low) + 1:
                    yield order


def _train_span(mesh: Mesh, node_of: Ints) -> int:
    """Nodes that the widest tensor-parallel group touches."""
    position = np.arange(mesh.world_size)
    first = position.copy()
    for axis, size, stride, _ in mesh.digits:
        if axis == "tp":
            first -= position // stride % size * stride
    touched = distinct(first * mesh.world_size + node_of)
    return int(np.bincount(touched // mesh.world_size).max())


def _tuples(groups: Ints) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))


def _span(groups: Ints, node_of: Ints) -> int:
    table = np.sort(node_of[groups], axis=1)
    return int((np.diff(table, axis=1) > 0).sum(axis=1).max(initial=0)) + 1


def _block(count: int, tp: int, per_node: int | None) -> int:
    """Ranks among which slots are assigned freely: a node, or as many as can be searched."""
    if per_node and per_node % tp == 0 and count % per_node == 0:
        return per_node
    best = tp
    for replicas in range(1, count // tp + 1):
        if count % (tp * replicas) == 0 and math.comb(replicas + tp, tp) <= 3000:
            best = tp * replicas
    return best


def _groups(ranks: Ints, slots: Ints, tp: int) -> Ints:
    """The n-th rank of each slot makes the n-th group: rising, because no slot runs ahead of the one below it."""
    return np.stack([ranks[slots == slot] for slot in range(tp)], axis=1)


class _Prices:
    """Bytes that each slot needs and that each place of a training mesh has of it, from one canonical move."""

    def __init__(self, specs: Sequence[ParamSpec], train: TrainLayout, tp_gen: int) -> None:
        assert train.dp is not None
        self.parts = train.dp if train.zero == 3 else 1
        self.tp, self.pp = train.tp, train.pp
        layers = count_layers(specs)
        canonical = Mesh(train.tp, train.pp, self.parts)
        experts = max((s.expert + 1 for s in specs if s.expert is not None), default=0)
        src = ShardLayout.training(canonical, layers, zero=train.zero, vpp=train.vpp, experts=experts)
        dst = ShardLayout.replicas(tp_gen, [range(tp_gen)], layers, experts=experts)
        # Parameters that differ in name and layer only are counted and multiplied.
        counts: dict[tuple, int] = {}
        chosen: dict[tuple, ParamSpec] = {}
        for spec in specs:
            key = (spec.shape, spec.dim, spec.blocks, spec.valid_rows, spec.dtype, src.stages(spec), spec.expert is None)
            counts[key] = counts.get(key, 0) + 1
            chosen.setdefault(key, replace(spec, expert=None if spec.expert is None else 0))
        traffic = find_traffic(list(chosen.values()), src, dst)
        boxes = traffic.boxes
        times = np.array(list(counts.values()), np.int64)[boxes.entry_param]
        total = np.concatenate([[0], np.cumsum(boxes.entry_bytes * times)])
        self.weight = np.diff(total[boxes.pointer])
        self._holds = _membership(traffic.holders, canonical.world_size)
        self._takes = _membership(traffic.takers, tp_gen)
        # float64 adds whole numbers exactly up to 2**53
        weighted = self._takes * self.weight[:, None].astype(np.float64)
        self.need = weighted.sum(0).astype(np.int64)
        self.overlap = (self._holds.T.astype(np.float64) @ weighted).astype(np.int64)

    def places(self, mesh: Mesh) -> Ints:
        """Row of :attr:`overlap` of every rank of a mesh."""
        rank = np.arange(mesh.world_size)
        index = {axis: np.zeros(mesh.world_size, np.int64) for axis in AXES}
        for axis, size, stride, weight in mesh.digits:
            index[axis] += rank // stride % size * weight
        part = index["dp"] if self.parts > 1 else 0
        return index["tp"] + self.tp * (index["pp"] + self.pp * part)

    def ingress(self, place: Ints, node_of: Ints, taking: Ints, slots: Ints) -> int:
        """Bytes that must enter the busiest node: wanted by a rank on it, held by none."""
        nodes = int(node_of[-1]) + 1
        if nodes == 1:
            return 0
        begin = np.searchsorted(node_of, np.arange(nodes + 1))
        among = np.searchsorted(node_of[taking], np.arange(nodes + 1))
        alike: dict[tuple[bytes, bytes], int] = {}
        for node in range(nodes):
            here, asked = place[begin[node] : begin[node + 1]], slots[among[node] : among[node + 1]]
            alike[here.tobytes(), asked.tobytes()] = node
        most = 0
        for node in alike.values():
            held = self._holds[:, place[begin[node] : begin[node + 1]]].any(1)
            wanted = self._takes[:, slots[among[node] : among[node + 1]]].any(1)
            most = max(most, int(self.weight[wanted & ~held].sum()))
        return most


def _membership(groups: Sequence[Ints], size: int) -> NDArray[np.bool_]:
    out = np.zeros((len(groups), size), bool)
    for line, ranks in enumerate(groups):
        out[line, ranks] = True
    return out
