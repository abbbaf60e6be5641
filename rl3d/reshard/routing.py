"""Who sends what to whom: sources for every class of bytes, balanced, each byte entering a node once.

The objective is lexicographic. First, bytes that enter nodes: a class that nobody on a node holds enters it once, and
whoever received it hands it on inside. Then the busiest sender between nodes, then the busiest sender inside each node;
both are minimal flows (:mod:`rl3d.reshard.flow`), exact up to the rows at which boxes may be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rl3d.reshard.boxes import Ints, distinct
from rl3d.reshard.flow import spread
from rl3d.reshard.traffic import Traffic

SMALL = 256
"""What is less than one ``SMALL``-th of the busiest sender's load is sent whole: cutting it would gain nothing."""


class Pieces(NamedTuple):
    """Columns: ``dst`` gets bytes ``start`` to ``stop`` of class ``cls`` from ``src``.

    With a ``fan`` (-1: none), ``dst`` hands the piece on to the other ranks of ``fans[fan]``, which are on its node.
    """

    src: Ints
    dst: Ints
    cls: Ints
    start: Ints
    stop: Ints
    fan: Ints
    fans: list[Ints]


@dataclass(frozen=True)
class Levels:
    """Lower bounds in bytes: what has to enter each node, and the busiest sender between and inside nodes.

    ``sender`` is the busiest sender where only holders send and nodes do not matter.
    """

    ingress: tuple[int, ...]
    between: int
    inside: int
    sender: int


class _Builder:
    """Pieces under construction: arrays of them, and small ones one by one."""

    def __init__(self) -> None:
        self._columns: list[tuple[Ints, ...]] = []
        self._single: list[tuple[int, ...]] = []
        self._known: dict[bytes, int] = {}

    def fan(self, ranks: Ints) -> int:
        """Number of a set of ranks that pieces fan out to."""
        return self._known.setdefault(ranks.tobytes(), len(self._known))

    def add(self, src: Ints, dst: Ints, cls: int, start: Ints, stop: Ints, fan: int = -1) -> None:
        if len(src):
            self._columns.append((src, dst, np.full(len(src), cls), start, stop, np.full(len(src), fan)))

    def add_whole(self, src: int, dst: int, cls: int, size: int, fan: int = -1) -> None:
        """A whole class of ``size`` bytes."""
        self._single.append((src, dst, cls, size, fan))

    def finish(self) -> Pieces:
        if self._single:
            src, dst, cls, size, fan = (np.ascontiguousarray(c) for c in np.array(self._single, np.int64).T)
            self._columns.append((src, dst, cls, np.zeros_like(size), size, fan))
        fans = [np.frombuffer(ranks, np.int64) for ranks in self._known]
        if not self._columns:
            empty = np.zeros(0, np.int64)
            return Pieces(empty, empty, empty, empty, empty, empty, fans)
        src, dst, cls, start, stop, fan = (np.concatenate(c) for c in zip(*self._columns, strict=True))
        return Pieces(src, dst, cls, start, stop, fan, fans)


@dataclass
class _Want:
    """Ranks of one node that lack a class, and who can give it to them; ``outside`` when that is nobody of the node.

    Such a class enters the node: ``source[i]`` sends the bytes from ``cuts[i]`` to ``cuts[i + 1]``.
    """

    cls: int
    node: int
    takers: Ints
    holders: Ints
    outside: bool
    cuts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    source: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class _Lone:
    """Ranks that lack a class which nobody on their node holds or else wants: they get it and that is all."""

    cls: int
    takers: Ints
    holders: Ints


class _Parts(NamedTuple):
    """Equal needs cut among senders: need ``need[i]`` gets bytes ``start[i]`` to ``stop[i]`` from ``source[i]``."""

    need: Ints
    start: Ints
    stop: Ints
    source: Ints


class _Loads:
    """Bytes that every rank sends so far, and to which nodes."""

    def __init__(self, nodes: Ints) -> None:
        self.nodes = nodes
        self.sent = [0] * len(nodes)
        self._partners: dict[int, set[int]] = {}

    def meet(self, sources: Ints, takers: Ints) -> None:
        """Remember who sends to which node."""
        for source, node in zip(sources.tolist(), self.nodes[takers].tolist(), strict=True):
            self._partners.setdefault(node, set()).add(source)

    def add(self, quota: dict[int, int]) -> None:
        for sender, amount in quota.items():
            self.sent[sender] += amount

    def least(self, senders: Sequence[int], amount: int, near: int) -> int:
        """The least busy sender gets ``amount`` more for rank ``near``; among equals a partner, then the nearest."""
        partners = self._partners.get(int(self.nodes[near]), set())
        best = min(senders, key=lambda s: (self.sent[s], s not in partners, abs(s - near), s))
        self.sent[best] += amount
        return best


def route(traffic: Traffic, nodes: Ints) -> tuple[Pieces, Levels]:
    """Choose a source for everything that a rank wants and does not hold. Nothing is received twice.

    Args:
        traffic: classes with their holders and takers.
        nodes: node of each global rank.
    """
    size = traffic.boxes.class_bytes
    wants, lone = _find_wants(traffic, nodes)
    amounts = [(len(lacking) * int(w), tuple(h.tolist())) for lacking, w, h in zip(traffic.lacking, size, traffic.holders)]
    sender = spread([demand for demand in amounts if demand[0]]).level
    ingress = np.zeros(int(nodes.max(initial=0)) + 1, np.int64)
    for alone in lone:
        ingress[nodes[alone.takers]] += size[alone.cls]
    for want in wants:
        if want.outside:
            ingress[want.node] += size[want.cls]
    out = _Builder()
    between = _enter([w for w in wants if w.outside], lone, traffic, nodes, out)
    inside = 0
    by_node: dict[int, list[_Want]] = {}
    for want in wants:
        by_node.setdefault(want.node, []).append(want)
    loads = _Loads(nodes)
    for mine in by_node.values():
        inside = max(inside, _serve(mine, traffic, loads, out))
    return out.finish(), Levels(tuple(ingress.tolist()), between, inside, sender)


def _find_wants(traffic: Traffic, nodes: Ints) -> tuple[list[_Want], list[_Lone]]:
    wants, lone = [], []
    for cls, (holders, lacking) in enumerate(zip(traffic.holders, traffic.lacking, strict=True)):
        if not len(lacking):
            continue
        where, at = nodes[lacking], nodes[holders]
        order = np.argsort(where, kind="stable")
        lacking, where = lacking[order], where[order]
        heads = np.flatnonzero(np.concatenate([[True], where[1:] != where[:-1]]))
        counts = np.diff(np.concatenate([heads, [len(where)]]))
        has = np.zeros(int(nodes.max()) + 1, bool)
        has[at] = True
        alone = (counts == 1) & ~has[where[heads]]
        if alone.any():
            lone.append(_Lone(cls, lacking[heads[alone]], holders))
        for head, count in zip(heads[~alone].tolist(), counts[~alone].tolist(), strict=True):
            node = int(where[head])
            group = lacking[head : head + count]
            inside = bool(has[node])
            wants.append(_Want(cls, node, group, holders[at == node] if inside else holders, not inside))
    return wants, lone


def _enter(crossing: list[_Want], lone: list[_Lone], traffic: Traffic, nodes: Ints, out: _Builder) -> int:
    """Senders of everything that enters a node; returns the least possible load of the busiest of them."""
    size = traffic.boxes.class_bytes
    groups: dict[int, tuple[Ints, list[_Want]]] = {}
    none = np.zeros(0, np.int64)
    for alone in lone:
        groups[alone.cls] = (alone.takers, [])
    for want in crossing:
        groups.setdefault(want.cls, (none, []))[1].append(want)
    demands = [
        (int(size[c]) * (len(takers) + len(wants)), tuple(traffic.holders[c].tolist()))
        for c, (takers, wants) in groups.items()
    ]
    level, quotas = spread(demands)
    loads = _Loads(nodes)
    later = []
    met: list[tuple[Ints, Ints]] = []
    for (cls, (takers, wants)), (_, senders), quota in zip(groups.items(), demands, quotas, strict=True):
        if len(senders) > 1 and size[cls] * SMALL < level:
            later.append((cls, senders))
            continue
        loads.add(quota)
        if len(quota) == 1:
            (sender,) = quota
            met.append((np.full(len(takers) + len(wants), sender), np.array([*takers, *(w.takers[0] for w in wants)])))
            out.add(np.full(len(takers), sender), takers, cls, 0 * takers, 0 * takers + size[cls])
            for want in wants:
                want.cuts, want.source = np.array([0, size[cls]]), np.array([sender])
            continue
        # Needs lie beside senders by rank, so that neighbours serve neighbours.
        first = np.concatenate([takers, np.array([w.takers[0] for w in wants], np.int64)])
        order = np.argsort(first, kind="stable")
        parts = _pair(len(first), int(size[cls]), quota, cls, traffic, level)
        which = order[parts.need]
        met.append((parts.source, first[which]))
        mine = which < len(takers)
        out.add(parts.source[mine], takers[which[mine]], cls, parts.start[mine], parts.stop[mine])
        for index, want in enumerate(wants):
            here = which == len(takers) + index
            want.cuts, want.source = np.concatenate([parts.start[here], parts.stop[here][-1:]]), parts.source[here]
    if later:
        for source, taker in met:
            loads.meet(source, taker)
    for cls, senders in later:
        takers, wants = groups[cls]
        amount = int(size[cls])
        for taker in takers.tolist():
            out.add_whole(loads.least(senders, amount, taker), taker, cls, amount)
        for want in wants:
            want.cuts = np.array([0, amount])
            want.source = np.array([loads.least(senders, amount, int(want.takers[0]))])
    return level


def _pair(count: int, size: int, quota: dict[int, int], cls: int, traffic: Traffic, level: int, times: int = 1) -> _Parts:
    """Lay ``count`` equal needs end to end beside the senders' quotas, and cut where either ends.

    With ``times``, every byte of the class counts that often.
    """
    senders = np.array([s for s in sorted(quota) if quota[s]], np.int64)
    ends = np.cumsum([quota[s] for s in senders.tolist()])
    whole = size * times
    at = distinct(np.concatenate([ends, np.arange(1, count + 1) * whole]))
    which = np.searchsorted(ends, at)
    need = (at - 1) // whole
    # A sender may miss its quota by a row at each cut, so rows are kept whole where that is little.
    stop = traffic.boxes.round_down(np.full(len(at), cls), (at - need * whole) // times, level // (2048 * times))
    fresh = np.concatenate([[True], need[1:] != need[:-1]])
    start = np.where(fresh, 0, np.concatenate([[0], stop[:-1]]))
    keep = stop > start
    return _Parts(need[keep], start[keep], stop[keep], senders[which[keep]])


def _serve(wants: list[_Want], traffic: Traffic, loads: _Loads, out: _Builder) -> int:
    """Everything that the ranks of one node give each other; returns the least possible load of the busiest."""
    size = traffic.boxes.class_bytes
    demands: list[tuple[int, tuple[int, ...]]] = []
    for want in wants:
        members = want.takers if want.outside else want.holders
        demands.append((int(size[want.cls]) * (len(want.takers) - want.outside), tuple(members.tolist())))
    level, quotas = spread(demands)
    later = []
    for want, (amount, senders), quota in zip(wants, demands, quotas, strict=True):
        if len(senders) > 1 and (amount if want.outside else int(size[want.cls])) * SMALL < level:
            later.append((want, senders))
            continue
        loads.add(quota)
        if len(quota) == 1:
            _whole(want, next(iter(quota)), int(size[want.cls]), out)
        elif want.outside:
            times = len(want.takers) - 1
            _relay(want, _pair(1, int(size[want.cls]), quota, want.cls, traffic, level, times), out)
        else:
            parts = _pair(len(want.takers), int(size[want.cls]), quota, want.cls, traffic, level)
            out.add(parts.source, want.takers[parts.need], want.cls, parts.start, parts.stop)
    for want, senders in later:
        amount, cls, takers = int(size[want.cls]), want.cls, want.takers.tolist()
        if not want.outside:
            for taker in takers:
                out.add_whole(loads.least(senders, amount, taker), taker, cls, amount)
            continue
        _whole(want, loads.least(senders, amount * (len(takers) - 1), int(want.source[0])), amount, out)
    return level


def _whole(want: _Want, sender: int, size: int, out: _Builder) -> None:
    """All that the node lacks of a class comes from one of its ranks."""
    if not want.outside:
        for taker in want.takers.tolist():
            out.add_whole(sender, taker, want.cls, size)
    elif len(want.source) == 1:
        out.add_whole(int(want.source[0]), sender, want.cls, size, out.fan(want.takers))
    else:
        zero = np.zeros(1, np.int64)
        _relay(want, _Parts(zero, zero, zero + size, zero + sender), out)


def _relay(want: _Want, parts: _Parts, out: _Builder) -> None:
    """Each part enters at its relay, from whoever sends it there, and goes on to the others of the node."""
    points = distinct(np.concatenate([want.cuts, parts.start, parts.stop[-1:]]))
    start, stop = points[:-1], points[1:]
    by = parts.source[np.searchsorted(parts.start, start, "right") - 1]
    source = want.source[np.searchsorted(want.cuts, start, "right") - 1]
    out.add(source, by, want.cls, start, stop, out.fan(want.takers))
