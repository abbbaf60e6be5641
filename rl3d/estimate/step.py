"""Predicted seconds of one RL step: rollout, log-probabilities, update and switch on a pair of layouts.

Put together from :mod:`rl3d.estimate.generating` and :mod:`rl3d.estimate.training`; what was measured stands beside it in
docs/gpus.md. Made for comparing layouts: on other GPUs the shares of :mod:`rl3d.estimate.kernels` are a guess.
"""

from dataclasses import dataclass, replace

from rl3d.estimate.generating import decode_step, kv_bytes_per_token, prefill
from rl3d.estimate.topology import Topology
from rl3d.estimate.training import Pass, Rows, optimizer_seconds
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

HOST_TOKEN = 0.64e-6
"""Host time of a token between the phases: samples of all ranks are put in order, packed and unpacked on every rank."""


@dataclass(frozen=True)
class Workload:
    """What one step does: ``sequences`` samples (prompts x n), all of the same length, and how they are trained.

    ``micro_batch`` counts sequences of one data-parallel rank; ``optimizer_steps`` mini-batches share the step; ``samples``
    have one prompt, which is computed once; ``recompute``, ``sequence_parallel`` and ``offload`` are the configuration's.
    """

    prompt_len: int = 512
    response_len: int = 512
    sequences: int = 512
    micro_batch: int = 4
    optimizer_steps: int = 1
    reference: bool = True
    critic: bool = False
    recompute: str = "none"
    sequence_parallel: bool = False
    offload: str = "none"
    samples: int = 1

    @property
    def length(self) -> int:
        return self.prompt_len + self.response_len

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of a step."""
        return self.sequences * self.length

    def times(self, factor: float) -> "Workload":
        """The same with another number of sequences."""
        return replace(self, sequences=max(1, round(self.sequences * factor)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by phase. ``bubble`` is the part of ``update`` that pipeline stages wait; ``host`` is what passes
    between the phases."""

    prefill: float
    decode: float
    logprobs: float
    update: float
    switch: float
    bubble: float
    waves: int
    host: float

    @property
    def generation(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        return self.generation + self.logprobs + self.update + self.switch + self.host


def predict_step(
    arch: Architecture,
    train: TrainLayout,
    gen: GenLayout,
    gpus: int,
    topology: Topology,
    work: Workload,
    *,
    switch: float = 0.0,
    kv_bytes: float | None = None,
    itemsize: int = 2,
) -> StepTime:
    """Seconds of a step. ``kv_bytes`` is the cache that fits on one GPU: sequences beyond it wait for the next wave.

    Raises :class:`LayoutError` when the layouts do not fit the number of GPUs.
    """
    train, replicas = train.resolve(gpus), gen.replicas(gpus)
    share = -(-work.sequences // replicas)
    per_sequence = work.length * kv_bytes_per_token(arch, itemsize) / min(gen.tp, arch.num_kv_heads)
    at_once = share if kv_bytes is None else max(1, min(share, int(kv_bytes // per_sequence)))
    waves = -(-share // at_once)
    batch = -(-share // waves)
    context = work.prompt_len + work.response_len / 2
    decode = waves * work.response_len * decode_step(arch, gen.tp, batch, context, topology, itemsize)
    _, prompts = prefill(arch, gen.tp, -(-share // work.samples), work.prompt_len, topology, itemsize)

    assert train.dp is not None
    each = max(1, -(-work.sequences // (train.dp * work.optimizer_steps)))  # sequences of a rank in a mini-batch
    micro = -(-each // work.micro_batch)
    rows = Rows(micro, each / micro * work.length, work.length, each / micro * work.response_len)
    bubble = (train.pp - 1) / (micro * train.vpp)
    evaluated = 1 + work.reference + work.critic  # old log-probabilities, reference, values
    forward = training = shared = 0.0
    for critic in (False, True)[: 1 + work.critic]:
        passes = Pass(arch, train, rows, topology, itemsize, sequence_parallel=work.sequence_parallel, columns=not critic)
        forward += passes.forward() * (1 if critic else 1 + work.reference)
        training += passes.training(work.recompute)
        shared += optimizer_seconds(arch, train, topology, micro, evaluated, itemsize, work.offload)
    steps = work.optimizer_steps
    return StepTime(
        prefill=prompts,
        decode=decode,
        logprobs=steps * forward * (1 + bubble),
        update=steps * (training * (1 + bubble) + shared),
        switch=switch,
        bubble=steps * training * bubble,
        waves=waves,
        host=work.tokens * HOST_TOKEN,
    )
