"""Whether a pair of layouts fits on the GPUs: the memory plan against a capacity, with room for the KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

from rl3d.estimate.memory import FRAGMENTATION, predict
from rl3d.estimate.settings import MemorySettings
from rl3d.estimate.step import Workload
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

CACHE = "KV cache"


@dataclass(frozen=True)
class Fit:
    """Bytes on the fullest GPU: phase -> item -> bytes without the KV cache, and what generation leaves for that.

    ``capacity`` is what can be allocated: the GPU's memory without what lies outside of torch and what its allocator
    loses.
    """

    phases: dict[str, dict[str, int]]
    capacity: int
    kv_bytes: int

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(items.values()) for phase, items in self.phases.items()}

    @property
    def training(self) -> int:
        """Most bytes of a phase other than generation."""
        return max((size for phase, size in self.peaks.items() if phase != "generation"), default=0)

    @property
    def generation(self) -> int:
        """Bytes of generation without the KV cache."""
        return self.peaks.get("generation", 0)


MemoryOf = Callable[[TrainLayout, GenLayout, int], Fit]
"""Memory of a pair on a number of GPUs."""


def memory_of(arch: Architecture, topology: Topology, work: Workload, dtype: str, staging_bytes: int) -> MemoryOf:
    """The function that :func:`rl3d.estimate.scale.candidates` asks, by :func:`rl3d.estimate.memory.predict`."""

    def fit(train: TrainLayout, gen: GenLayout, gpus: int) -> Fit:
        settings = MemorySettings(
            dtype=dtype,
            max_sequence_length=work.length,
            responses=-(-work.sequences // work.optimizer_steps),
            micro_batch_tokens=work.micro_batch * work.length,
            recompute=work.recompute,
            sequence_parallel=work.sequence_parallel,
            offload=work.offload,
            reference="device" if work.reference else "none",
            critic="device" if work.critic else "none",
            max_sequences=-(-work.sequences // gen.replicas(gpus)),
            staging_bytes=staging_bytes,
        )
        plan = predict(arch, train.resolve(gpus), gen, settings)
        phases = {p.name: {item: n for item, n in p.items.items() if item != CACHE} for p in plan.phases}
        capacity = int((topology.memory_gb * 1e9 - plan.outside) / (1 + FRAGMENTATION))
        return Fit(phases, capacity, capacity - sum(phases["generation"].values()))

    return fit
