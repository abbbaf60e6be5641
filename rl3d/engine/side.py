"""Generation on one set of ranks, and what moves weights there and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.arena import Arena
from rl3d.engine.feed import WeightFeed
from rl3d.engine.training import TrainingEngine
from rl3d.generation.engine import GenerationEngine
from rl3d.layout import ParamSpec
from rl3d.layout.sharding import ShardLayout
from rl3d.reshard.cache import cached_plan
from rl3d.reshard.executor import Resharder
from rl3d.reshard.plan import Plan
from rl3d.reshard.streams import bucket_bytes
from rl3d.reshard.transports import CollectiveTransport, PeerTransport, Transport
from rl3d.reshard.transports.collective import Staging


@dataclass
class GenerationSide:
    """Generation on ``ranks``, seen from this rank.

    Attributes:
        layout: who holds what.
        groups, generator: ``None`` on ranks that do not generate.
        weights: canonical name -> this rank's generation weights; empty on such ranks.
        aliases: names of those that lie in the memory of the training weights.
        epoch: of the arena, when graphs were last known to be right.
        feed: what brings the weights to a generator with a model of its own; there are no ``weights`` here then.
    """

    ranks: tuple[int, ...]
    layout: ShardLayout
    groups: ModelGroups | None
    generator: GenerationEngine | None
    weights: dict[str, Tensor]
    aliases: frozenset[str] = frozenset()
    epoch: int = 0
    feed: WeightFeed | None = None
    _movers: dict[str, Resharder] = field(default_factory=dict, repr=False)

    @property
    def alias_bytes(self) -> int:
        """Bytes of generation weights that take no memory of their own."""
        return sum(self.weights[name].nbytes for name in self.aliases)


class Movers:
    """Makes the resharders between the training engine and generation sides, each once, and shares their staging memory.

    Every method is collective over ``group``.

    Args:
        train: the training engine.
        specs, source: parameters, training layout.
        partitions: layout of what each rank has updated before the all-gather; ``None`` where that is never a source.
        group, rank, device, nodes, staging_bytes: as for :class:`Resharder` and the planner.
        transport: ``"p2p"``, ``"auto"`` or ``"peer"``.
        frees: training weights leave the device between switches, so peers must not read them.
        arena: where generation weights lie; it learns when peers read it.
    """

    def __init__(self, train: TrainingEngine, *, specs: Sequence[ParamSpec], source: ShardLayout,
                 partitions: ShardLayout | None, group: Any, rank: int, device: torch.device,
                 nodes: Sequence[int] | None, staging_bytes: int, transport: str, frees: bool,
                 arena: Arena):  # fmt: skip
        self.train, self.specs, self.source, self.partitions = train, specs, source, partitions
        self.group, self.rank, self.device, self.nodes = group, rank, device, nodes
        self.staging_bytes, self.transport, self.frees = staging_bytes, transport, frees
        self._staging, self._arena = Staging(device), arena

    def plan_to(self, side: GenerationSide) -> Plan:
        """Training weights -> generation weights."""
        return self._plan(self.source, side.layout)

    def whole(self, side: GenerationSide) -> Resharder | WeightFeed:
        """From the whole training weights (stage 3: the flat shards)."""
        if side.feed is not None:
            if self.train.zero.rests_on_host:
                side.feed.release()
            return side.feed

        def make() -> Resharder:
            mover = self._mover(self.plan_to(side), self.train.weights, side.weights, self._direct())
            if self.train.zero.rests_on_host:
                mover.release()
            return mover

        return self._once(side, "whole", make)

    def partial(self, side: GenerationSide) -> Resharder:
        """From what each data-parallel rank has updated, before any all-gather."""
        assert self.partitions is not None
        plan = self._plan(self.partitions, side.layout)
        return self._once(side, "partial", lambda: self._mover(plan, self.train.local_weights, side.weights, self._direct()))

    def back(self, side: GenerationSide) -> Resharder:
        """From the generation weights to the training weights."""
        plan = self._plan(side.layout, self.source)
        return self._once(side, "back", lambda: self._mover(plan, side.weights, self.train.local_weights, None))

    def gather_is_dearer(self, side: GenerationSide) -> bool:
        """Whether the busiest rank receives more in an all-gather of the partitions than from the generation weights."""
        back = max(self._plan(side.layout, self.source).certificate.received, default=0)
        dp = self.train.groups.dp_size
        gathered = sum(t.nbytes for t in self.train.zero.flat_weights()) * (dp - 1) // dp
        return back < gathered

    def _once(self, side: GenerationSide, kind: str, make: Any) -> Resharder:
        if kind not in side._movers:
            side._movers[kind] = make()
        return side._movers[kind]

    def _plan(self, source: ShardLayout, target: ShardLayout) -> Plan:
        return cached_plan(self.specs, source, target, staging_bytes=bucket_bytes(self.staging_bytes), nodes=self.nodes)

    def _direct(self) -> Transport | None:
        """Reading of peers' memory, where it is asked for and nothing is freed that they read."""
        if self.transport == "p2p" or self.frees:
            return None
        return PeerTransport(self.group, self.device, self.rank, nodes=self.nodes, required=self.transport == "peer")

    def _mover(self, plan: Plan, src: dict[str, Tensor], dst: dict[str, Tensor], direct: Transport | None) -> Resharder:
        if direct is None:
            direct = CollectiveTransport(self.group, self.device, self._staging)
        elif plan.segments.relay.any():  # what is handed on is read out of the generation weights
            self._arena.exported = True
        return Resharder(plan, self.rank, self.group, src, dst, self.device, direct, self.nodes)
