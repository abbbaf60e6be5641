"""The least possible load of the busiest sender, exactly: maximal flow with a searched capacity.

Demands (bytes that any of a set of senders can provide) are spread over senders. Demands with one set of senders, and
senders with one set of demands, are the same to the flow and are one node of its network.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """``level`` is the least load of the busiest sender; ``quotas[d]`` is how many bytes of demand ``d`` each sends."""

    level: int
    quotas: list[dict[int, int]]


class Network:
    """Maximal flow by Dinic's algorithm in integers."""

    def __init__(self, nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.to: list[int] = []
        self.room: list[int] = []

    def add(self, a: int, b: int, capacity: int) -> int:
        """An edge from ``a`` to ``b``; returns its number (its reverse is the next one)."""
        number = len(self.to)
        for start, end, size in ((a, b, capacity), (b, a, 0)):
            self.edges[start].append(len(self.to))
            self.to.append(end)
            self.room.append(size)
        return number

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.edges)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                if self.room[edge] and level[self.to[edge]] < 0:
                    level[self.to[edge]] = level[node] + 1
                    queue.append(self.to[edge])
        return level

    def run(self, source: int, sink: int) -> tuple[int, set[int]]:
        """(flow, nodes on the source's side of a minimal cut)."""
        total = 0
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return total, {n for n, at in enumerate(level) if at >= 0}
            at = [0] * len(self.edges)
            while True:
                path: list[int] = []
                node = source
                while node != sink:
                    while at[node] < len(self.edges[node]):
                        edge = self.edges[node][at[node]]
                        if self.room[edge] and level[self.to[edge]] == level[node] + 1:
                            path.append(edge)
                            node = self.to[edge]
                            break
                        at[node] += 1
                    else:
                        if node == source:
                            break
                        level[node] = -1
                        node = self.to[path.pop() ^ 1]
                if node != sink:
                    break
                pushed = min(self.room[edge] for edge in path)
                for edge in path:
                    self.room[edge] -= pushed
                    self.room[edge ^ 1] += pushed
                total += pushed


def spread(demands: Sequence[tuple[int, tuple[int, ...]]], load: dict[int, int] | None = None) -> Spread:
    """Spread demands so that the busiest sender has least to send.

    Args:
        demands: (bytes, senders that can provide them) pairs; senders without repeats.
        load: bytes that senders have to send anyway.

    Parts of the problem that share no sender are solved apart, each at its own level.
    """
    base = dict(load or {})
    quotas: list[dict[int, int]] = [{} for _ in demands]
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (amount, senders) in enumerate(demands):
        if len(senders) == 1:
            base[senders[0]] = base.get(senders[0], 0) + amount
            quotas[index] = {senders[0]: amount}
        elif amount:
            groups.setdefault(senders, []).append(index)
    level = max(base.values(), default=0)
    for part in _components(list(groups)):
        amounts = [sum(demands[d][0] for d in groups[senders]) for senders in part]
        reached, flows = _solve(part, amounts, base)
        level = max(level, reached)
        for senders, flow in zip(part, flows, strict=True):
            _hand_out([(d, demands[d][0]) for d in groups[senders]], flow, quotas)
    return Spread(level, quotas)


def _components(groups: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    root: dict[int, int] = {}

    def find(x: int) -> int:
        while root.setdefault(x, x) != x:
            root[x] = root[root[x]]
            x = root[x]
        return x

    for senders in groups:
        first = find(senders[0])
        for sender in senders[1:]:
            root[find(sender)] = first
    parts: dict[int, list[tuple[int, ...]]] = {}
    for senders in groups:
        parts.setdefault(find(senders[0]), []).append(senders)
    return list(parts.values())


def _solve(part: list[tuple[int, ...]], amounts: list[int], base: dict[int, int]) -> tuple[int, list[list[tuple[int, int]]]]:
    """Least level, and for each group of demands who sends how much of it, in order of rank."""
    member: dict[int, list[int]] = {}
    for number, senders in enumerate(part):
        for sender in senders:
            member.setdefault(sender, []).append(number)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for sender in sorted(member):
        alike.setdefault((base.get(sender, 0), tuple(member[sender])), []).append(sender)
    bundles = list(alike.items())
    level = max((base.get(s, 0) for s in member), default=0)
    everyone = sum(base.get(s, 0) for s in member) + sum(amounts)
    level = max(level, -(-everyone // len(member)))
    while True:
        network = Network(len(part) + len(bundles) + 2)
        source, sink = len(part) + len(bundles), len(part) + len(bundles) + 1
        for number, amount in enumerate(amounts):
            network.add(source, number, amount)
        inner = []
        for b, ((held, numbers), alike_senders) in enumerate(bundles):
            network.add(len(part) + b, sink, (level - held) * len(alike_senders))
            inner += [(number, b, network.add(number, len(part) + b, amounts[number])) for number in numbers]
        flow, reached = network.run(source, sink)
        if flow == sum(amounts):
            break
        # Newton: these demands can only be sent by these senders, so the level must rise at least to their mean
        stuck = sum(amounts[n] for n in range(len(part)) if n in reached)
        only = [bundle for b, bundle in enumerate(bundles) if len(part) + b in reached]
        held_by = sum(held * len(alike_senders) for (held, _), alike_senders in only)
        level = -(-(stuck + held_by) // sum(len(alike_senders) for _, alike_senders in only))
    flows: list[list[tuple[int, int]]] = [[] for _ in part]
    given = dict.fromkeys(member, 0)
    for number, b, edge in inner:
        amount, members = network.room[edge ^ 1], bundles[b][1]
        if amount:
            # equal shares; odd bytes go where fewest went before, so that none exceeds the level
            share, odd = divmod(amount, len(members))
            favoured = set(sorted(members, key=lambda s: (given[s], s))[:odd])
            for sender in members:
                mine = share + (sender in favoured)
                given[sender] += mine
                flows[number].append((sender, mine))
    return level, [sorted(flow) for flow in flows]


def _hand_out(demands: list[tuple[int, int]], flow: list[tuple[int, int]], quotas: list[dict[int, int]]) -> None:
    """Demands one after the other take what the senders, one after the other, have to give."""
    at, left = 0, flow[0][1] if flow else 0
    for demand, amount in demands:
        while amount:
            while not left:
                at += 1
                left = flow[at][1]
            taken = min(left, amount)
            quotas[demand][flow[at][0]] = quotas[demand].get(flow[at][0], 0) + taken
            amount -= taken
            left -= taken
