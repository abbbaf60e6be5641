"""The hybrid engine: one set of weights, moved between the training layout and the generation layout."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl3d.engine.arena import Arena
from rl3d.engine.feed import WeightFeed
from rl3d.engine.parking import Parking, TrainingCopy
from rl3d.engine.report import SwitchReport
from rl3d.engine.side import GenerationSide, Movers
from rl3d.engine.training import TrainingEngine
from rl3d.engine.transaction import SwitchError, Transaction
from rl3d.engine.verification import NonFiniteWeightsError, check_finite, check_level, chosen
from rl3d.generation.engine import GenerationEngine
from rl3d.generation.megatron import MegatronGenerator
from rl3d.generation.sizing import STRATEGIES
from rl3d.layout import ParamSpec
from rl3d.layout.sharding import ShardLayout
from rl3d.reshard.executor import Resharder
from rl3d.reshard.fingerprint import compare, fingerprint_shards, replica_differences
from rl3d.reshard.plan import Plan
from rl3d.utils.profiling import record_switch, switches_are_profiled

__all__ = [
    "GENERATION", "TRAINING", "HybridEngine", "ModeError", "NonFiniteWeightsError", "SwitchError", "SwitchReport",
    "VerificationError",
]  # fmt: skip

TRAINING, GENERATION = "training", "generation"


class ModeError(RuntimeError):
    """Something was called in the wrong mode; the message names the switch to call."""


class VerificationError(RuntimeError):
    """After a move a parameter is not what it was before; the message names it."""


class HybridEngine:
    """Two modes over one set of weights.

    Generation weights lie in an arena whose addresses stay, or where they coincide in that of the training weights; the
    training copy is the one that learns. A switch happens on all ranks or on none: when a stage fails anywhere (out of
    memory, say), every rank takes back what it did, and the old mode goes on.

    Args:
        train: the training engine.
        make_side: makes generation on some ranks (collective), the default ones when given none.
        arena: memory of the generation weights of all sides; one of them has it at a time.
        specs, source: parameters, training layout.
        partitions: what each rank has updated before ZeRO's all-gather, where that may be a source.
        group: a process group over all ranks used by nothing else.
        rank, device: this rank.
        staging_bytes: cap on staging buffers, per direction.
        nodes: node of each rank.
        verify: ``"off"``; ``"sampled"`` or ``"full"``: compare fingerprints of some, or of all parameters after each switch.
            Weights that are not finite are refused in any case.
        training_copy: ``"keep"``, or ``"drop"``: the flat 16-bit (fp32 when training in fp32) training weights are given
            back during generation and rebuilt from the generation weights on the way back.
        gradients, optimizer_state: during generation; see :class:`rl3d.engine.parking.Parking`.
        transport: ``"p2p"``: messages. ``"auto"``: ranks of a host read each other's memory where they can, and where
            none of it is freed between two switches; ``"peer"``: they must.
    """

    def __init__(self, train: TrainingEngine, make_side: Callable[[Sequence[int] | None], GenerationSide], arena: Arena, *,
                 specs: Sequence[ParamSpec], source: ShardLayout, partitions: ShardLayout | None = None, group: Any,
                 rank: int, device: torch.device, staging_bytes: int = 48 << 20, nodes: Sequence[int] | None = None,
                 verify: str | bool = "off", training_copy: str = "keep", gradients: str = "keep",
                 optimizer_state: str = "keep", transport: str = "auto"):  # fmt: skip
        if transport not in ("p2p", "auto", "peer"):
            raise ValueError(f"transport = {transport!r}: expected 'p2p', 'auto' or 'peer'")
        frees = training_copy == "drop" or train.zero.rests_on_host
        if transport == "peer" and frees:
            raise ValueError("transport = 'peer': training_copy='drop' and offload='params' free memory that peers read")
        self.train, self.arena, self._make_side = train, arena, make_side
        self.specs, self.source, self.partitions = list(specs), source, partitions
        self.group, self.rank, self.device = group, rank, device
        self.verify, self.copy = check_level(verify), TrainingCopy(train.zero, training_copy)
        self.parking = Parking(train.zero, gradients, optimizer_state)
        self.mode = TRAINING
        self.version = 0  # of the training weights; each optimiser step makes a new one
        self._finite: int | None = None  # version that was found to be finite
        self._checks = 0
        self._strategy: str | None = None  # of the KV cache, where a switch said so
        self._movers = Movers(train, specs=self.specs, source=source, partitions=partitions, group=group, rank=rank,
                              device=device, nodes=nodes, staging_bytes=staging_bytes, transport=transport,
                              frees=frees, arena=arena)  # fmt: skip
        self.side = make_side(None)
        if self.side.feed is not None and (self.verify != "off" or training_copy == "drop" or transport == "peer"):
            raise ValueError(
                f"verify = {self.verify!r}, training_copy = {training_copy!r}, transport = {transport!r}: an engine with a "
                f"model of its own has no generation weights here to compare, rebuild from or write into; leave them out"
            )
        self._sides = {self.side.ranks: self.side}
        self._usual = self.side.ranks
        self._prepare(self.side)
        self.plan: Plan = self._movers.plan_to(self.side)

    # ---- state

    @property
    def generator(self) -> GenerationEngine | None:
        """The generator, in generation mode only. Raises :class:`ModeError` in training mode."""
        self.require(GENERATION, "generate")
        return self.side.generator

    @property
    def gen_weights(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's generation weights."""
        return self.side.weights

    def require(self, mode: str, action: str) -> None:
        """Raise :class:`ModeError` unless in ``mode``."""
        if self.mode != mode:
            raise ModeError(f"{action}() needs {mode} mode, the actor is in {self.mode} mode; call switch_to_{mode}() first")

    def weights_changed(self) -> None:
        """To be called after every optimiser step or load: what generation holds is stale from now on."""
        self.version += 1
        if self.side.generator is not None:
            self.side.generator.expected_version = self.version

    # ---- the two switches

    def switch_to_generation(self, device_ids: Sequence[int] | None = None,
                             cache_strategy: str | None = None) -> SwitchReport:  # fmt: skip
        """Move the weights into the generation layout. Collective and idempotent.

        Args:
            device_ids: ranks (one a GPU) that generate, a multiple of the generation layout's tp; the others take part in
                the call and hold no generation weights afterwards. By default all, or those that generate already. A set
                that is new builds groups, plan and model once.
            cache_strategy: of the key/value cache from now on.

        Raises:
            ValueError: ``device_ids`` or ``cache_strategy`` that cannot be.
            NonFiniteWeightsError: weights of this rank are NaN or infinite.
            VerificationError: with ``verify``, on every rank, when a fingerprint changed.
            SwitchError: a stage failed on another rank (these are raised there). Whatever is raised, the mode stays
                training on every rank.
            LostRankError: a rank has gone.
        """
        report = SwitchReport("to_generation")
        wanted = self._wanted(device_ids)
        if cache_strategy is not None and cache_strategy not in STRATEGIES:
            raise ValueError(f"cache_strategy = {cache_strategy!r}: expected one of {', '.join(STRATEGIES)}")
        if self.mode == GENERATION and wanted == self.side.ranks:
            self._set_strategy(cache_strategy)
            return report
        if self.mode == GENERATION:
            self.switch_to_training()
        switch = Transaction("the switch to generation", self.group, self.rank, self.device)
        before = self.side
        if wanted != before.ranks:
            switch.stage(
                f"set up generation on ranks {wanted}", lambda: self._take(wanted, report), lambda: self._turn(before)
            )
            switch.stage("plan the move", lambda: self._prepare(self.side))
        side, generator = self.side, self.side.generator
        self._set_strategy(cache_strategy)
        switch.stage("park training state", lambda: self._park(report), self.parking.come, when=self.parking.acts)
        switch.stage("move the weights", lambda: self._move_to(side, report))
        switch.stage("hand over finite weights", lambda: self._check_finite(side, report))
        switch.stage("verify the weights", lambda: self._check(side, report), when=self.verify != "off")

        def cache() -> None:
            with report.stage("cache"):
                if generator is not None:
                    report.cache_bytes = report.allocated["KV cache"] = generator.allocate_cache()

        undo = None if generator is None else generator.release_cache
        switch.stage("allocate the KV cache", cache, undo)
        if generator is not None:
            generator.weights_version = generator.expected_version = self.version
        if self.copy.leaves:
            report.freed["training copy"] = self.copy.drop()
        report.arena_bytes, report.alias_bytes = self.arena.nbytes, side.alias_bytes
        report.host_bytes = self.parking.host_bytes
        self.mode = GENERATION
        record_switch(report, self.rank, self.device)
        return report

    def switch_to_training(self) -> SwitchReport:
        """Back to training: the cache is released, a dropped training copy is rebuilt. Collective and idempotent.

        Raises:
            VerificationError: with ``verify``, on every rank, when a fingerprint changed.
            SwitchError: a stage failed on another rank. Whatever is raised, the mode stays generation on every rank.
        """
        report = SwitchReport("to_training")
        if self.mode == TRAINING:
            return report
        side, generator = self.side, self.side.generator
        switch = Transaction("the switch to training", self.group, self.rank, self.device)

        def release() -> None:
            with report.stage("cache"):
                if generator is not None:
                    report.cache_bytes = -generator.release_cache()
                    report.freed["KV cache"] = -report.cache_bytes
                    report.graph_bytes = getattr(generator, "graph_bytes", 0)

        undo = None if generator is None else generator.allocate_cache
        switch.stage("release the KV cache", release, undo, together=True)

        def restore() -> None:
            report.allocated["training copy"] = self.copy.restore()

        switch.stage("allocate the training copy", restore, self.copy.drop, when=self.copy.leaves)
        whole = not self.copy.leaves and not self.train.zero.gather_pending
        switch.stage("rebuild the training copy", lambda: self._make_whole(side, report), when=not whole)
        switch.stage("verify the weights", lambda: self._check(side, report), when=self.verify != "off")
        switch.stage("bring training state back", lambda: self._unpark(report), self.parking.leave,
                     when=self.parking.acts)  # fmt: skip
        self.mode = TRAINING
        record_switch(report, self.rank, self.device)
        return report

    # ---- stages

    def _wanted(self, device_ids: Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that are to generate."""
        if device_ids is None:
            return self.side.ranks if self.mode == GENERATION else self._usual
        if self.side.feed is not None:
            raise ValueError(f"device_ids = {list(device_ids)}: an engine with a model of its own stays on all its ranks")
        ranks, tp = tuple(sorted(device_ids)), self.side.layout.tp
        known = self.source.ranks
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(known) or len(ranks) % tp:
            raise ValueError(
                f"device_ids = {list(device_ids)}: expected different ranks out of {list(known)}, a multiple of the "
                f"generation layout's tp = {tp} of them"
            )
        return ranks

    def _take(self, ranks: tuple[int, ...], report: SwitchReport) -> None:
        """Generate on other ranks: this rank's part of it, and the arena where it belongs."""
        with report.stage("side"):
            if isinstance(self.side.generator, MegatronGenerator):
                self.side.generator.drop_cache()
            held = self.arena.nbytes
            if ranks not in self._sides:
                self.arena.release()  # a new model is there before it moves in
                self._sides[ranks] = self._make_side(ranks)
            self._turn(self._sides[ranks])
            change = self.arena.nbytes - held
            (report.allocated if change > 0 else report.freed)["generation weights"] = abs(change)

    def _turn(self, side: GenerationSide) -> None:
        self.side = side
        if set(side.weights) - side.aliases:
            self.arena.reserve()
        else:
            self.arena.release()
        runner = getattr(side.generator, "runner", None)
        if runner is not None and side.epoch != self.arena.epoch:
            runner.forget()  # its graphs read the weights at their old addresses
        side.epoch = self.arena.epoch

    def _prepare(self, side: GenerationSide) -> None:
        """Whatever moves weights to and from a side. Collective; made once."""
        self._movers.whole(side)
        takes_partitions = self.partitions is not None and side.feed is None
        if takes_partitions:
            self._movers.partial(side)
        self._rebuilds = takes_partitions and self._movers.gather_is_dearer(side)
        if self._rebuilds or self.copy.leaves:
            self._movers.back(side)

    def _set_strategy(self, strategy: str | None) -> None:
        """The cache of whoever generates is of this strategy, or of that given last."""
        self._strategy = strategy or self._strategy
        generator = self.side.generator
        if not isinstance(generator, MegatronGenerator) or self._strategy in (None, generator.cache_strategy):
            return
        generator.set_strategy(self._strategy)
        if self.mode == GENERATION:
            generator.allocate_cache()

    def _park(self, report: SwitchReport) -> None:
        before, start = self.parking.copied_bytes, time.perf_counter()
        if freed := self.parking.leave():
            report.freed |= freed
            report.host_copied = self.parking.copied_bytes - before
            report.seconds["park"] = time.perf_counter() - start

    def _unpark(self, report: SwitchReport) -> None:
        start = time.perf_counter()
        if allocated := self.parking.come():
            report.allocated |= allocated
            report.host_bytes = self.parking.host_bytes
            report.seconds["unpark"] = time.perf_counter() - start

    def _move_to(self, side: GenerationSide, report: SwitchReport) -> None:
        if not self.train.zero.gather_pending:
            report.source = "weights"
            return self._move(self._movers.whole(side), report)
        if self.partitions is None or side.feed is not None:  # whole weights are wanted
            self._gather(report)
            return self._move_to(side, report)
        report.source = "partitions"
        self._move(self._movers.partial(side), report)

    def _make_whole(self, side: GenerationSide, report: SwitchReport) -> None:
        """Whole training weights, from the nearest holder."""
        if self.copy.leaves or (self.train.zero.gather_pending and self._rebuilds):
            report.source = "generation copy"
            self._move(self._movers.back(side), report)
            self.train.zero.weights_rebuilt()
        elif self.train.zero.gather_pending:
            self._gather(report)

    def _gather(self, report: SwitchReport) -> None:
        with report.stage("gather"):
            report.source = "partitions"
            report.gathered_bytes = self.train.zero.complete_weights()

    def _move(self, resharder: Resharder | WeightFeed, report: SwitchReport) -> None:
        visiting = self.train.zero.rests_on_host and report.direction == "to_generation"
        if visiting:  # from the host for this move only
            resharder.src = self.train.weights
        if isinstance(resharder, Resharder):
            resharder.measures_link = switches_are_profiled()
        report.add_move(resharder.run())
        if visiting:
            resharder.release()

    # ---- proof

    def training_fingerprints(self, specs: Sequence[ParamSpec] | None = None) -> dict[str, int]:
        """Fingerprint of every parameter (or of ``specs``) as the training layout holds it. Collective."""
        layout, weights = self._training()
        return fingerprint_shards(self.specs if specs is None else specs, layout, self.rank, weights, self.group)

    def generation_fingerprints(self, specs: Sequence[ParamSpec] | None = None) -> dict[str, int]:
        """Fingerprint of every parameter (or of ``specs``) as the generation layout holds it. Collective."""
        side, specs = self.side, self.specs if specs is None else specs
        return fingerprint_shards(specs, side.layout, self.rank, side.weights, self.group)

    def _training(self) -> tuple[ShardLayout, dict[str, Tensor]]:
        """What training holds without any communication: where a gather is pending, the partitions."""
        if self.train.zero.gather_pending and self.partitions is not None:
            return self.partitions, self.train.local_weights
        return self.source, self.train.weights

    def _check_finite(self, side: GenerationSide, report: SwitchReport) -> None:
        if self._finite != self.version:
            with report.stage("verify"):
                check_finite(side.weights if side.feed is None else self.train.local_weights, self.rank)
            self._finite = self.version

    def _check(self, side: GenerationSide, report: SwitchReport) -> None:
        specs = chosen(self.specs, self.verify, self._checks)
        if not specs:
            return
        self._checks += 1
        with report.stage("verify"):
            layout, weights = self._training()
            problems = compare(self.training_fingerprints(specs), self.generation_fingerprints(specs))
            problems += replica_differences(specs, layout, self.rank, weights, self.group)
            problems += replica_differences(specs, side.layout, self.rank, side.weights, self.group)
            report.verified = len(specs)
        if problems:
            raise VerificationError(f"{len(problems)} parameters changed in {report.direction}: " + "; ".join(problems[:4]))
