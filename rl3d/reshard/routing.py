"""Who sends what to whom: sources for every class of bytes, balanced, each byte entering a node once.

The objective is lexicographic. First, bytes that enter nodes: a class that nobody on a node holds enters it once, and
whoever received it hands it on inside. Then the busiest sender between nodes, then the busiest sender inside each node;
both are minimal flows (:mod:`rl3d.reshard.flow`), exact up to the rows at which boxes may be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints
from rl3d.reshard.flow import spread
from rl3d.reshard.traffic import Traffic

SMALL = 256
"""What is less than one ``SMALL``-th of the busiest sender's load is sent whole: cutting it would gain nothing."""


class Pieces(NamedTuple):
    """Columns: ``dst`` gets bytes ``start`` to ``stop`` of class ``cls`` from ``src``.

    ``relay`` pieces are handed on by a rank that received them itself before; they lie in its destination tensors.
    """

    src: Ints
    dst: Ints
    cls: Ints
    start: Ints
    stop: Ints
    relay: NDArray[np.bool_]

    def take(self, index: NDArray[Any]) -> "Pieces":
        """The chosen pieces (index array or mask)."""
        return Pieces(*(column[index] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Levels:
    """Lower bounds in bytes: what has to enter each node, and the busiest sender between and inside nodes.

    ``sender`` is the busiest sender where only holders send and nodes do not matter.
    """

    ingress: tuple[int, ...]
    between: int
    inside: int
    sender: int


@dataclass
class _Builder:
    """Pieces under construction."""

    columns: list[tuple[Ints, ...]] = field(default_factory=list)

    def add(self, src: Ints, dst: Ints, cls: int, start: Ints, stop: Ints, relay: bool = False) -> None:
        size = len(src)
        if size:
            self.columns.append((src, dst, np.full(size, cls), start, stop, np.full(size, relay)))

    def finish(self) -> Pieces:
        if not self.columns:
            empty = np.zeros(0, np.int64)
            return Pieces(empty, empty, empty, empty, empty, np.zeros(0, np.bool_))
        return Pieces(*(np.concatenate(c) for c in zip(*self.columns, strict=True)))


@dataclass(frozen=True)
class _Want:
    """Ranks of one node that lack a class, and where it can come from."""

    cls: int
    node: int
    takers: Ints
    holders: Ints
    outside: bool


def route(traffic: Traffic, nodes: Ints) -> tuple[Pieces, Levels]:
    """Choose a source for everything that a rank wants and does not hold. Nothing is received twice.

    Args:
        traffic: classes with their holders and takers.
        nodes: node of each global rank.
    """
    wants = _find_wants(traffic, nodes)
    size = traffic.boxes.class_bytes
    total = [(int(size[w.cls]) * len(w.takers), w) for w in wants]
    sender = _blind_level(total, traffic)
    crossing = [w for w in wants if w.outside]
    ingress = np.zeros(int(nodes.max(initial=0)) + 1, np.int64)
    for want in crossing:
        ingress[want.node] += size[want.cls]
    out = _Builder()
    enter, between = _enter(crossing, traffic)
    inside = 0
    by_node: dict[int, list[_Want]] = {}
    for want in wants:
        by_node.setdefault(want.node, []).append(want)
    for mine in by_node.values():
        inside = max(inside, _serve(mine, enter, traffic, out))
    return out.finish(), Levels(tuple(ingress.tolist()), between, inside, sender)


def _find_wants(traffic: Traffic, nodes: Ints) -> list[_Want]:
    wants = []
    for cls, (holders, takers) in enumerate(zip(traffic.holders, traffic.takers, strict=True)):
        lacking = takers[~np.isin(takers, holders)]
        if not len(lacking):
            continue
        where, at = nodes[lacking], nodes[holders]
        order = np.argsort(where, kind="stable")
        lacking, where = lacking[order], where[order]
        cuts = np.flatnonzero(np.diff(where)) + 1
        have = set(at.tolist())
        for group in np.split(lacking, cuts):
            node = int(nodes[group[0]])
            if node in have:
                wants.append(_Want(cls, node, group, holders[at == node], False))
            else:
                wants.append(_Want(cls, node, group, holders, True))
    return wants


def _blind_level(total: Sequence[tuple[int, _Want]], traffic: Traffic) -> int:
    amounts: dict[int, int] = {}
    for amount, want in total:
        amounts[want.cls] = amounts.get(want.cls, 0) + amount
    return spread([(a, tuple(traffic.holders[c].tolist())) for c, a in amounts.items()]).level


def _enter(crossing: list[_Want], traffic: Traffic) -> tuple[dict[tuple[int, int], tuple[Ints, Ints]], int]:
    """For each class and node that it enters: cut points of the class and the sender of each part between them."""
    size = traffic.boxes.class_bytes
    by_class: dict[int, list[_Want]] = {}
    for want in crossing:
        by_class.setdefault(want.cls, []).append(want)
    classes = list(by_class)
    demands = [(int(size[c]) * len(by_class[c]), tuple(traffic.holders[c].tolist())) for c in classes]
    level, quotas = spread(demands)
    found: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    load: dict[int, int] = {}
    later = []
    for cls, (_, senders), quota in zip(classes, demands, quotas, strict=True):
        if len(senders) > 1 and size[cls] * SMALL < level:
            later.append(cls)
            continue
        for sender, mine in quota.items():
            load[sender] = load.get(sender, 0) + mine
        parts = _pair(len(by_class[cls]), int(size[cls]), quota, cls, traffic, level)
        for want, (cuts, source) in zip(by_class[cls], parts, strict=True):
            found[cls, want.node] = (cuts, source)
    for cls in later:
        for want in by_class[cls]:
            source = _least(traffic.holders[cls], load, int(size[cls]), want.takers)
            found[cls, want.node] = (np.array([0, size[cls]]), np.array([source]))
    return found, level


def _least(holders: Ints, load: dict[int, int], amount: int, near: Ints) -> int:
    """The least busy of ``holders``; among equals the one nearest by rank, so that partners stay the same."""
    goal = int(near[0])
    best = min(holders.tolist(), key=lambda h: (load.get(h, 0), abs(h - goal), h))
    load[best] = load.get(best, 0) + amount
    return best


def _pair(count: int, size: int, quota: dict[int, int], cls: int, traffic: Traffic, level: int) -> list[tuple[Ints, Ints]]:
    """Lay ``count`` equal needs end to end beside the senders' quotas: (cut points, senders) of each need."""
    senders = np.array([s for s in sorted(quota) if quota[s]], np.int64)
    ends = np.cumsum([quota[s] for s in senders.tolist()])
    at = np.unique(np.concatenate([ends, np.arange(1, count + 1) * size]))
    which = np.searchsorted(ends, at)
    need = (at - 1) // size
    # A sender may miss its quota by a row at each cut, so rows are kept whole where that is little.
    inside = traffic.boxes.round_down(np.full(len(at), cls), at - need * size, level // 2048)
    out = []
    for index in range(count):
        mine = slice(*np.searchsorted(need, [index, index + 1]))
        cuts = np.concatenate([np.zeros(1, np.int64), inside[mine]])
        keep = np.diff(cuts) > 0
        out.append((np.concatenate([cuts[:1], cuts[1:][keep]]), senders[which[mine][keep]]))
    return out


def _serve(wants: list[_Want], enter: dict, traffic: Traffic, out: _Builder) -> int:
    """Everything that the ranks of one node get; returns the least possible load of its busiest sender inside."""
    size = traffic.boxes.class_bytes
    demands, asked = [], []
    for want in wants:
        members = want.takers if want.outside else want.holders
        times = len(want.takers) - want.outside
        if want.outside and not times:
            cuts, source = enter[want.cls, want.node]
            out.add(source, np.repeat(want.takers, len(source)), want.cls, cuts[:-1], cuts[1:])
            continue
        demands.append((int(size[want.cls]) * times, tuple(members.tolist())))
        asked.append(want)
    level, quotas = spread(demands)
    load: dict[int, int] = {}
    later = []
    for want, (amount, senders), quota in zip(asked, demands, quotas, strict=True):
        if len(senders) > 1 and (amount if want.outside else size[want.cls]) * SMALL < level:
            later.append(want)
            continue
        for sender, mine in quota.items():
            load[sender] = load.get(sender, 0) + mine
        if want.outside:
            times = len(want.takers) - 1
            ((cuts, relay),) = _pair(1, int(size[want.cls]) * times, quota, want.cls, _Scaled(traffic, times), level)
            _relay(want, cuts // times, relay, *enter[want.cls, want.node], out)
        else:
            for taker, (cuts, source) in zip(
                want.takers.tolist(),
                _pair(len(want.takers), int(size[want.cls]), quota, want.cls, traffic, level),
                strict=True,
            ):
                out.add(source, np.full(len(source), taker), want.cls, cuts[:-1], cuts[1:])
    for want in later:
        amount, cls = int(size[want.cls]), want.cls
        whole = np.array([0, amount])
        if want.outside:
            relay = _least(want.takers, load, amount * (len(want.takers) - 1), want.takers)
            _relay(want, whole, np.array([relay]), *enter[cls, want.node], out)
        else:
            for taker in want.takers.tolist():
                source = _least(want.holders, load, amount, np.array([taker]))
                out.add(np.array([source]), np.array([taker]), cls, whole[:1], whole[1:])
    return level


class _Scaled:
    """A class whose relays send each byte ``times`` times: positions are stretched by that much."""

    def __init__(self, traffic: Traffic, times: int) -> None:
        self._traffic, self._times = traffic, times

    @property
    def boxes(self) -> "_Scaled":
        return self

    def round_down(self, cls: Ints, at: Ints, limit: int) -> Ints:
        return self._traffic.boxes.round_down(cls, at // self._times, limit) * self._times


def _relay(want: _Want, cuts: Ints, relay: Ints, entry_cuts: Ints, source: Ints, out: _Builder) -> None:
    """Each part enters at its relay, from whoever sends it there, and goes on to the others of the node."""
    points = np.union1d(cuts, entry_cuts)
    start, stop = points[:-1], points[1:]
    by = relay[np.searchsorted(cuts, start, "right") - 1]
    out.add(source[np.searchsorted(entry_cuts, start, "right") - 1], by, want.cls, start, stop)
    for piece, sender in enumerate(by.tolist()):
        others = want.takers[want.takers != sender]
        count = len(others)
        begin, end = np.full(count, start[piece]), np.full(count, stop[piece])
        out.add(np.full(count, sender), others, want.cls, begin, end, True)
