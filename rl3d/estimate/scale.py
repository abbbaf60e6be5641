"""Every pair of layouts that a model admits on a number of GPUs: whether it fits, how long a step takes, best first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl3d.config import zero_problem
from rl3d.estimate.fit import Fit, MemoryOf
from rl3d.estimate.moves import STAGING_BYTES, Move, plan_move
from rl3d.estimate.step import StepTime, Workload, predict_step
from rl3d.estimate.time import HOST
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, LayoutError, TrainLayout, stage_layers, tp_sizes
from rl3d.models import Architecture

PLANNED = 5
"""So many of the best pairs are planned exactly; for the others the bytes of the switch are a formula's."""


@dataclass(frozen=True)
class Candidate:
    """One pair of layouts. ``reason`` says why it cannot run; otherwise ``step`` says how long a step takes.

    ``move`` is the exact plan of the switch, made for the best pairs only.
    """

    gpus: int
    train: TrainLayout
    gen: GenLayout
    fit: Fit | None = None
    step: StepTime | None = None
    reason: str = ""
    move: Move | None = None

    def tokens_per_second(self, work: Workload) -> float:
        """Prompt and response tokens per second and GPU; 0 where it cannot run."""
        return work.tokens / self.step.total / self.gpus if self.step else 0.0


def layouts(arch: Architecture, gpus: int, topology: Topology) -> Iterator[tuple[TrainLayout, GenLayout]]:
    """Pairs that the model, the ranks and the training engine admit.

    Tensor parallelism stays in a node. ZeRO stages 2 and 3 are listed without a pipeline, where the engine runs them as
    such, and with data parallelism, without which they are stage 1; stage 0 costs more memory than 1 and saves nothing.
    Generation cuts no key/value head unless the model has fewer than two.
    """
    sizes = [tp for tp in tp_sizes(arch.num_heads, arch.num_kv_heads, arch.ffn_size) if gpus % tp == 0]
    sizes = [tp for tp in sizes if tp <= topology.gpus_per_node]
    slots = [tp for tp in sizes if tp <= arch.num_kv_heads]
    for tp in sizes:
        for pp in (n for n in range(1, min(gpus // tp, arch.num_layers) + 1) if gpus // tp % n == 0):
            try:
                stage_layers(arch.num_layers, pp)
            except LayoutError:
                continue
            dp = gpus // tp // pp
            for zero in (1, 2, 3) if pp == 1 and dp > 1 else (1,):
                yield from ((TrainLayout(tp, pp, dp, zero), GenLayout(slot)) for slot in slots)


def candidates(
    arch: Architecture,
    gpus: int,
    topology: Topology,
    work: Workload,
    memory: MemoryOf,
    *,
    train: TrainLayout | None = None,
    gen: GenLayout | None = None,
    planned: int = PLANNED,
    dtype: str = "bfloat16",
    staging_bytes: int = STAGING_BYTES,
) -> list[Candidate]:
    """All pairs, those that run first, the fastest step first; ``train`` or ``gen`` keep one side fixed.

    Raises :class:`TopologyError` when the GPUs do not fill nodes.
    """
    topology.nodes_of(gpus)
    pairs = layouts(arch, gpus, topology)
    if train is not None:
        fixed = train.resolve(gpus)
        pairs = iter(dict.fromkeys((fixed, slot) for _, slot in pairs))
    found = [
        _judge(arch, candidate, slot, gpus, topology, work, memory, dtype)
        for candidate, slot in pairs
        if gen is None or slot == gen
    ]
    found.sort(key=_order)
    head = [c for c in found[:planned] if c.step]
    exact = []
    for c in head:
        assert c.step is not None
        move = plan_move(arch, c.train, c.gen, gpus, topology, dtype=dtype, staging_bytes=staging_bytes)
        exact.append(replace(c, move=move, step=replace(c.step, switch=move.time.seconds)))
    return sorted(exact, key=_order) + found[len(head) :]


def _order(c: Candidate) -> tuple[bool, float, int, int, int]:
    """Fastest first, then what lacks least memory; of equals fewer stages, smaller slices, less sharding."""
    lacks = max(c.fit.peaks.values()) - c.fit.capacity if c.fit else float("inf")
    return (c.step is None, c.step.total if c.step else lacks, c.train.pp, c.train.tp, c.train.zero)


def _judge(
    arch: Architecture, train: TrainLayout, gen: GenLayout, gpus: int, topology: Topology, work: Workload,
    memory: MemoryOf, dtype: str,
) -> Candidate:  # fmt: skip
    assert train.dp is not None
    if (problem := zero_problem(train, work.offload)) is not None:
        return Candidate(gpus, train, gen, reason=problem)
    share = work.sequences // work.optimizer_steps
    if share % train.dp:
        return Candidate(gpus, train, gen, reason=f"{share} sequences do not divide by dp = {train.dp}")
    fit = memory(train, gen, gpus)
    for phase, used in fit.peaks.items():
        if used > fit.capacity:
            item = max(fit.phases[phase], key=lambda name: fit.phases[phase][name])
            text = f"{phase} needs {used / 1e9:.1f} of {fit.capacity / 1e9:.1f} GB; most of it {item}"
            return Candidate(gpus, train, gen, fit, reason=text)
    width = 4 if dtype == "float32" else 2
    needed = work.length * _kv_bytes(arch, gen.tp, width)
    if fit.kv_bytes < needed:
        text = f"{max(fit.kv_bytes, 0) / 1e9:.2f} GB are left for the KV cache; one sequence needs {needed / 1e9:.2f}"
        return Candidate(gpus, train, gen, fit, reason=text)
    switch = switch_formula(arch, train, gen, gpus, topology, width)
    step = predict_step(arch, train, gen, gpus, topology, work, switch=switch, kv_bytes=fit.kv_bytes, itemsize=width)
    return Candidate(gpus, train, gen, fit, step)


def _kv_bytes(arch: Architecture, tp: int, width: int) -> int:
    return 2 * arch.num_layers * -(-arch.num_kv_heads // tp) * arch.head_dim * width


def switch_formula(
    arch: Architecture, train: TrainLayout, gen: GenLayout, gpus: int, topology: Topology, width: int = 2
) -> float:
    """Seconds of the switch by the bytes of nested layouts: M / t_g - M / (p max(t, t_g)), under ZeRO-3 less is held.

    Over the network when no node holds a whole training copy, else over the links inside.
    """
    assert train.dp is not None
    model = arch.num_parameters * width
    held = model / (train.pp * max(train.tp, gen.tp)) / (train.dp if train.zero == 3 else 1)
    received = model / gen.tp - held
    copy = train.model_parallel * (train.dp if train.zero == 3 else 1)
    nodes = -(-copy // topology.gpus_per_node)
    crossing = 0.0 if nodes == 1 else model * (1 - 1 / nodes) / topology.nics_per_node
    rates = (topology.inside_gb_per_s, topology.between_gb_per_s, topology.copy_gb_per_s)
    inside, between, copies = (rate * 1e9 for rate in rates)
    crossed = crossing * topology.nics_per_node / topology.gpus_per_node  # of a rank, packed and unpacked
    return HOST + max(received / inside, crossing / between) + (2 * crossed + held) / copies


def scaling(best: Sequence[Candidate], work: Sequence[Workload]) -> list[dict[str, Any]]:
    """Throughput of the best candidate of each size against the smallest: tokens/s of all GPUs, speed-up, efficiency."""
    rows: list[dict[str, Any]] = []
    for c, w in zip(best, work, strict=True):
        total = c.tokens_per_second(w) * c.gpus
        first = rows[0] if rows else {"gpus": c.gpus, "tokens_per_s": total}
        speedup = total / first["tokens_per_s"] if first["tokens_per_s"] else 0.0
        rows.append({"gpus": c.gpus, "tokens_per_s": total, "speedup": speedup,
                     "efficiency": speedup * first["gpus"] / c.gpus})  # fmt: skip
    return rows
