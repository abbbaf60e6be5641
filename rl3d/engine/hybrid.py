"""The hybrid engine: one set of weights, moved between the training layout and the generation layout."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl3d.engine.feed import WeightFeed
from rl3d.engine.training import TrainingEngine
from rl3d.generation.engine import GenerationEngine
from rl3d.layout import ParamSpec
from rl3d.layout.sharding import ShardLayout
from rl3d.reshard.cache import cached_plan
from rl3d.reshard.executor import Resharder
from rl3d.reshard.fingerprint import compare, fingerprint_shards, replica_differences
from rl3d.reshard.plan import Plan
from rl3d.reshard.spans import Span, totals
from rl3d.reshard.transports import PeerTransport
from rl3d.utils.profiling import record_switch

TRAINING, GENERATION = "training", "generation"


class ModeError(RuntimeError):
    """Something was called in the wrong mode; the message names the switch to call."""


class VerificationError(RuntimeError):
    """After a move a parameter is not what it was before; the message names it."""


@dataclass
class SwitchReport:
    """One switch on one rank: seconds by stage and bytes by kind. A switch that had nothing to do is all zeros.

    Attributes:
        seconds: by stage: ``plan`` (checks before the move), ``move``, ``verify``, ``cache`` (made or freed).
        move_seconds: of the move, by kind: ``local`` copies, ``stage`` (into and out of staging memory), ``copy`` between
            ranks, ``wait`` for other ranks.
        received_by_link: payload bytes from ranks ``inside`` the node and ``between`` nodes.
        allocated, freed: bytes by what they were for.
        spans: every stage with its start, for a trace.
    """

    direction: str
    seconds: dict[str, float] = field(default_factory=dict)
    move_seconds: dict[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    received_by_link: dict[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    cache_bytes: int = 0
    allocated: dict[str, int] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    transport: str = ""
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as a stage of the switch."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = took = time.perf_counter() - start
            self.spans.append(Span(name, start, took))


class HybridEngine:
    """Two modes over one set of weights.

    Generation has an arena of its own whose addresses never change; the training copy is the one that learns. With
    ``training_copy="drop"`` the flat 16-bit (fp32 when training in fp32) training weights are given back during
    generation and rebuilt from the generation copy on the way back; gradients and optimiser state stay.

    Args:
        train: the training engine.
        generator: this rank's part of a replica, ``None`` on ranks that do not generate.
        gen_weights: canonical name -> local tensor of the generation layout (empty on such ranks).
        specs, source, target: parameters, training layout, generation layout.
        group: a process group over all ranks used by nothing else.
        rank, device: this rank.
        staging_bytes: cap on staging buffers, per direction.
        nodes: node of each rank.
        verify: compare fingerprints of every parameter after each move.
        training_copy: ``"keep"`` or ``"drop"``.
        transport: ``"p2p"``: messages. ``"auto"``: ranks of a host read each other's memory where they can, and where
            none of it is freed between two switches; ``"peer"``: they must.
        feed: brings the weights to a generator that has a model of its own, in the place of ``gen_weights``.
    """

    def __init__(self, train: TrainingEngine, generator: GenerationEngine | None, gen_weights: dict[str, Tensor], *,
                 specs: Sequence[ParamSpec], source: ShardLayout, target: ShardLayout, group: Any, rank: int,
                 device: torch.device, staging_bytes: int = 48 << 20, nodes: Sequence[int] | None = None,
                 verify: bool = False, training_copy: str = "keep", transport: str = "auto",
                 feed: WeightFeed | None = None):  # fmt: skip
        if training_copy not in ("keep", "drop"):
            raise ValueError(f"training_copy = {training_copy!r}: expected 'keep' or 'drop'")
        if transport not in ("p2p", "auto", "peer"):
            raise ValueError(f"transport = {transport!r}: expected 'p2p', 'auto' or 'peer'")
        if feed is not None and (verify or training_copy == "drop" or transport == "peer"):
            raise ValueError(
                f"verify = {verify}, training_copy = {training_copy!r}, transport = {transport!r}: an engine with a model "
                f"of its own has no generation weights here to compare, to rebuild from or to write into; leave them out"
            )
        frees = training_copy == "drop" or train.zero.rests_on_host
        if transport == "peer" and frees:
            raise ValueError("transport = 'peer': training_copy='drop' and offload='params' free memory that peers read")
        self.train, self._generator, self.gen_weights = train, generator, gen_weights
        self.specs, self.source, self.target = list(specs), source, target
        self.group, self.rank, self.device = group, rank, device
        self.verify, self.training_copy = verify, training_copy
        self.mode = TRAINING
        self.version = 0  # of the training weights; each optimiser step makes a new one
        self.plan: Plan = cached_plan(self.specs, source, target, staging_bytes=staging_bytes, nodes=nodes)
        peer = None
        if transport != "p2p" and not frees and feed is None:
            peer = PeerTransport(group, device, rank, nodes=nodes, required=transport == "peer")
        self._to_generation: Resharder | WeightFeed = feed or Resharder(
            self.plan, rank, group, train.weights, gen_weights, device, peer, nodes
        )
        if train.zero.rests_on_host:
            self._to_generation.release()
        self._to_training: Resharder | None = None
        if training_copy == "drop":
            back = cached_plan(self.specs, target, source, staging_bytes=staging_bytes, nodes=nodes)
            self._to_training = Resharder(back, rank, group, gen_weights, train.weights, device, nodes=nodes)
        self._flat_bytes = [t.untyped_storage().nbytes() for t in train.zero.flat_weights()]

    # ---- state

    @property
    def generator(self) -> GenerationEngine | None:
        """The generator, in generation mode only. Raises :class:`ModeError` in training mode."""
        self.require(GENERATION, "generate")
        return self._generator

    def require(self, mode: str, action: str) -> None:
        """Raise :class:`ModeError` unless in ``mode``."""
        if self.mode != mode:
            raise ModeError(f"{action}() needs {mode} mode, the actor is in {self.mode} mode; call switch_to_{mode}() first")

    def weights_changed(self) -> None:
        """To be called after every optimiser step or load: what generation holds is stale from now on."""
        self.version += 1
        if self._generator is not None:
            self._generator.expected_version = self.version

    # ---- the two switches

    def switch_to_generation(self) -> SwitchReport:
        """Move the weights into the generation layout. Collective and idempotent.

        Raises:
            VerificationError: with ``verify``, on every rank, when a fingerprint changed; the mode stays training.
        """
        report = SwitchReport("to_generation")
        if self.mode == GENERATION:
            return report
        self._move(self._to_generation, report)
        if self.verify:
            self._check(report)
        with report.stage("cache"):
            if self._generator is not None:
                self._generator.weights_version = self._generator.expected_version = self.version
                report.cache_bytes = self._generator.allocate_cache()
                report.allocated["KV cache"] = report.cache_bytes
        if self.training_copy == "drop":
            for flat, size in zip(self.train.zero.flat_weights(), self._flat_bytes, strict=True):
                flat.untyped_storage().resize_(0)
                report.freed["training copy"] = report.freed.get("training copy", 0) + size
        self.mode = GENERATION
        record_switch(report, self.rank, self.device)
        return report

    def switch_to_training(self) -> SwitchReport:
        """Back to training: the cache is released, a dropped training copy is rebuilt. Collective and idempotent."""
        report = SwitchReport("to_training")
        if self.mode == TRAINING:
            return report
        with report.stage("cache"):
            if self._generator is not None:
                report.cache_bytes = -self._generator.release_cache()
                report.freed["KV cache"] = -report.cache_bytes
        if self._to_training is not None:
            for flat, size in zip(self.train.zero.flat_weights(), self._flat_bytes, strict=True):
                flat.untyped_storage().resize_(size)
                flat.zero_()  # DeepSpeed's alignment padding at the end belongs to no parameter
                report.allocated["training copy"] = report.allocated.get("training copy", 0) + size
            self._move(self._to_training, report)
            if self.verify:
                self._check(report)
        self.mode = TRAINING
        record_switch(report, self.rank, self.device)
        return report

    def _move(self, resharder: Resharder | WeightFeed, report: SwitchReport) -> None:
        visiting = self.train.zero.rests_on_host and resharder is self._to_generation
        if visiting:  # from the host for this move only
            resharder.src = self.train.weights
        moved = resharder.run()
        if visiting:
            resharder.release()
        report.seconds |= totals(moved.spans)
        report.move_seconds = totals(moved.spans, depth=1)
        report.spans += moved.spans
        report.received_by_link = moved.received_by_link
        report.bytes_local, report.bytes_sent = moved.bytes_local, moved.bytes_sent
        report.bytes_received, report.staging_bytes = moved.bytes_received, moved.staging_bytes
        report.transport = moved.transport

    # ---- proof

    def training_fingerprints(self) -> dict[str, int]:
        """Fingerprint of every parameter as the training layout holds it. Collective."""
        return fingerprint_shards(self.specs, self.source, self.rank, self.train.weights, self.group)

    def generation_fingerprints(self) -> dict[str, int]:
        """Fingerprint of every parameter as the generation layout holds it. Collective."""
        return fingerprint_shards(self.specs, self.target, self.rank, self.gen_weights, self.group)

    def _check(self, report: SwitchReport) -> None:
        with report.stage("verify"):
            problems = compare(self.training_fingerprints(), self.generation_fingerprints())
            problems += replica_differences(self.specs, self.source, self.rank, self.train.weights, self.group)
            problems += replica_differences(self.specs, self.target, self.rank, self.gen_weights, self.group)
        if problems:
            raise VerificationError(f"{len(problems)} parameters changed in {report.direction}: " + "; ".join(problems[:4]))
