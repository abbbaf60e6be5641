"""A memory plan: bytes per rank in every phase of a step, by arithmetic, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl3d.distributed.page_locked import page_locked_bytes
from rl3d.estimate.parameters import stage_numels
from rl3d.estimate.passes import Passes
from rl3d.estimate.rollout import (
    cache_bytes,
    captured_bytes,
    fed_bytes,
    generation_weights,
    vllm_cache_bytes,
    vllm_weights,
    working_bytes,
)
from rl3d.estimate.settings import MemorySettings
from rl3d.estimate.states import States, stage_run, states
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

LIBRARIES = 72 << 20
"""What CUDA libraries take through torch's allocator: cuBLAS and cuBLASLt workspaces on Hopper."""
CONTEXT = 600 << 20
"""CUDA context and loaded kernels of a process: on the device, but not torch's."""
NCCL = 300 << 20
"""Buffers of the communicators of a job with several ranks; not torch's either."""
FRAGMENTATION = 0.04
"""Share of the peak that torch's allocator reserves beyond what is allocated."""


@dataclass(frozen=True)
class Phase:
    """Bytes of the rank that needs most in this phase, by item."""

    name: str
    items: Mapping[str, int]
    stage: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will take on each device.

    Attributes:
        phases: in the order of a step; each is that of the pipeline stage that needs most then.
        host: item -> bytes of host memory for each rank, beside the process itself.
        outside: bytes on the device that torch's allocator does not see.
    """

    phases: tuple[Phase, ...]
    host: Mapping[str, int]
    outside: int

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> int:
        """Most bytes allocated at a time: to be compared with :class:`rl3d.utils.peaks.PhasePeaks`."""
        return self.peak_phase.bytes

    @property
    def needed(self) -> int:
        """Bytes that the device must have: the peak, what the allocator loses, what lies outside."""
        return int(self.peak * (1 + FRAGMENTATION)) + self.outside

    def phase(self, name: str) -> Phase:
        """The phase of that name. Raises ``KeyError``."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    def table(self) -> Any:
        """A ``rich`` table: items down, phases across."""
        from rl3d.estimate.table import table

        return table(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, bytes as integers."""
        return {
            "peak": self.peak, "peak_phase": self.peak_phase.name, "needed": self.needed, "outside": self.outside,
            "host": dict(self.host),
            "phases": [{"name": p.name, "stage": p.stage, "bytes": p.bytes, "items": dict(p.items)} for p in self.phases],
        }  # fmt: skip


def predict(arch: Architecture, train: TrainLayout, gen: GenLayout, settings: MemorySettings) -> MemoryPlan:
    """The memory plan of one step on resolved layouts.

    Raises:
        LayoutError: ``train`` is not resolved, or the layouts cannot cut the model.
    """
    stages = [_Stage(arch, train, gen, settings, stage) for stage in range(train.pp)]
    worst: dict[str, Phase] = {}
    for stage in stages:
        for phase in stage.phases():
            if phase.name not in worst or phase.bytes > worst[phase.name].bytes:
                worst[phase.name] = phase
    host = max((stage.host for stage in stages), key=lambda items: sum(items.values()))
    cuda = settings.device == "cuda"
    world = train.model_parallel * (train.dp or 1)
    outside = CONTEXT + (NCCL if world > 1 else 0) if cuda else 0
    return MemoryPlan(tuple(worst.values()), host, outside)


_PARKED = {"master weights", "Adam moments"}


class _Stage:
    """One rank of one pipeline stage."""

    def __init__(self, arch: Architecture, train: TrainLayout, gen: GenLayout, settings: MemorySettings, stage: int):
        sequences = settings.at_once(max(1, train.model_parallel * (train.dp or 1) // gen.tp))
        settings = replace(settings, max_sequences=sequences)
        self.arch, self.train, self.gen, self.settings, self.stage = arch, train, gen, settings, stage
        self.padded = arch.padded_vocab(train.tp, gen.tp)
        self.numels = stage_numels(arch, self.padded, train.tp, train.pp, train.vpp, stage)
        self.state = states(self.numels, train, settings)
        self.passes = Passes(arch, self.padded // train.tp, train, settings, stage)
        self.host: dict[str, int] = {}
        self.resident: dict[str, int] = dict(self.state.held)
        self.switching, self.generating = self._engine()
        self._on_host(self.state.host)
        if settings.optimizer_state == "host" and settings.device == "cuda":  # which asks torch, and scale has none
            parked = [page_locked_bytes(size) for item, size in self.state.held.items() if item in _PARKED]
            self._on_host({"optimiser (parked)": sum(parked)} if parked else {})
        if settings.device == "cuda":
            self._keep("libraries", LIBRARIES)
        self.brought = 0
        self.reference = self._reference()
        self.critic, self.critic_passes = self._critic()

    # ---- what is always there

    def _keep(self, item: str, size: int) -> None:
        self.resident[item] = self.resident.get(item, 0) + size

    def _on_host(self, items: Mapping[str, int]) -> None:
        """Host memory; when training on a CPU that is the device."""
        for item, size in items.items():
            if self.settings.device == "cuda":
                self.host[item] = self.host.get(item, 0) + size
            else:
                self._keep(item, size)

    def _place(self, item: str, size: int, residency: str) -> int:
        """Keep a model where it stays between uses. Returns the bytes that each use brings to the device."""
        if residency == "device" or self.settings.device != "cuda":
            self._keep(item, size)
            return 0
        self._on_host({f"{item} (host)": page_locked_bytes(size)})
        return size

    def _engine(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the generation engine takes in a switch and while it generates, beside what it always keeps."""
        arch, gen, settings = self.arch, self.gen, self.settings
        working = {"activations": working_bytes(arch, self.padded, gen, settings)}
        if settings.engine != "vllm":
            weights = generation_weights(arch, self.padded, self.train, gen, settings)
            self._keep("generation weights", weights)
            self._keep("captured steps", captured_bytes(arch, self.padded, gen, settings))
            switching = {"staging": 2 * min(settings.staging_bytes, weights)}
            if settings.engine != "megatron":
                switching["weights on their way"] = fed_bytes(arch, self.padded, settings)
            return switching, {"KV cache": cache_bytes(arch, gen, settings), **working}
        own = {"vLLM weights": vllm_weights(arch, self.padded, gen, settings)}
        cache = {"KV cache": vllm_cache_bytes(arch, self.padded, gen, settings)}
        switching = {"staging": 2 * min(settings.staging_bytes, own["vLLM weights"]),
                     "weights on their way": fed_bytes(arch, self.padded, settings)}  # fmt: skip
        if settings.device == "cuda" and settings.vllm_sleeps:  # weights wake first, and take in the new ones
            return switching | own, own | cache | working
        for item, size in {**own, **cache}.items():
            self._keep(item, size)
        return switching, working

    def _frozen(self, numels: tuple[int, ...]) -> int:
        """Weights that only run forward; at stage 3 they are sharded like the actor's."""
        dp = self.train.dp or 1
        parts = [-(-n // dp) for n in numels] if stage_run(self.train, self.settings.bf16) == 3 else numels
        return self.settings.element * sum(parts)

    def _reference(self) -> int:
        if self.settings.reference == "none":
            return 0
        return self._place("reference", self._frozen(self.numels), self.settings.reference)

    def _critic(self) -> tuple[States | None, Passes | None]:
        settings, train = self.settings, self.train
        if settings.critic == "none":
            return None, None
        arch = (settings.critic_arch or self.arch).as_value_model()
        numels = stage_numels(arch, arch.padded_vocab(train.tp, self.gen.tp), train.tp, train.pp, train.vpp, self.stage)
        learns = settings.critic_learns
        state = states(numels, train, settings) if learns else States({"weights": self._frozen(numels)})
        self.brought = self._place("critic", sum(state.held.values()), settings.critic)
        self._on_host({f"critic's {item}": size for item, size in state.host.items()})
        return state, Passes(arch, 0, train, settings, self.stage)

    # ---- the phases

    def phases(self) -> list[Phase]:
        """All phases of a step, in order."""
        state, passes = self.state, self.passes
        found = [
            self._phase("switch", self.switching),
            self._generation(),
            self._phase("old log-probabilities", passes.forward(state)),
        ]
        if self.settings.reference != "none":
            found.append(self._phase("reference", {"reference": self.reference}, passes.forward(state)))
        if self.critic is not None and self.critic_passes is not None:
            brought = {"critic": self.brought}
            found.append(self._phase("values", brought, self.critic_passes.forward(self.critic)))
            if self.settings.critic_learns:
                found.append(self._phase("critic update", brought, self.critic_passes.backward(self.critic)))
                found.append(self._phase("critic step", brought, {"optimiser buffers": self.critic.step}))
        found.append(self._phase("update", passes.backward(state)))
        found.append(self._phase("optimiser step", {"optimiser buffers": state.step}))
        return found

    def _phase(self, name: str, *extra: Mapping[str, int]) -> Phase:
        items = dict(self.resident)
        for item, size in (pair for items_ in extra for pair in items_.items()):
            items[item] = items.get(item, 0) + size
        return Phase(name, {item: size for item, size in items.items() if size}, self.stage)

    def _generation(self) -> Phase:
        phase = self._phase("generation", self.generating)
        away = {"weights"} if self.settings.training_copy == "drop" else set()
        away |= {"gradients"} if self.settings.gradients == "drop" else set()
        if self.settings.optimizer_state == "host" and self.settings.device == "cuda":
            away |= _PARKED
        return Phase(phase.name, {k: v for k, v in phase.items.items() if k not in away}, phase.stage)
