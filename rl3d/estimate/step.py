"""Predicted seconds of one RL step: rollout by memory bandwidth, update by arithmetic, both with their communication.

A roofline with stated efficiencies, made for comparing layouts of one model; absolute seconds hold within some tens of
percent where kernels are as good as the efficiencies say (a decode step captured in a graph, fused attention).
"""

from dataclasses import dataclass, replace

from rl3d.estimate.flops import forward_flops
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

DECODE_BANDWIDTH = 0.70
"""Part of the memory bandwidth that decoding reaches, and beside it ..."""
DECODE_LAYER_SECONDS = 30e-6
"""... the fixed time of a layer's small kernels. Both fitted to decoding on one H200: 46,666 tokens/s of a 1.5B model at
batch 128 and context 900, 64,376 at batch 256, 19,382 of a 7B model at batch 128."""
PREFILL_EFFICIENCY = 0.60
TRAIN_EFFICIENCY = 0.45
"""Part of the peak bf16 rate that a pass over long sequences, or a training step without bubbles, reaches."""
OPTIMIZER_BYTES = 28
"""Read and written for each parameter by AdamW with fp32 master weights: gradient, weight and two moments."""
HOST_BANDWIDTH = 37e9
"""Bytes/s of one rank's optimiser in host memory: torch's fused AdamW takes 7.6 ms for 10M parameters."""
PCIE_BANDWIDTH = 25e9
"""Bytes/s of one GPU to or from host memory, PCIe 4."""
LINK_EFFICIENCY = 0.87
"""Collectives against point-to-point on the same links: 299 of 343 GB/s between two H200s."""


@dataclass(frozen=True)
class Workload:
    """What one step does: ``sequences`` samples (prompts x n), all of the same length, and how they are trained.

    ``micro_batch`` counts sequences of one data-parallel rank; ``optimizer_steps`` mini-batches share the step;
    ``recompute``, ``sequence_parallel`` and ``offload`` are the configuration's.
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
    """Seconds of one step by phase. ``bubble`` is the part of ``update`` that pipeline stages wait."""

    prefill: float
    decode: float
    logprobs: float
    update: float
    switch: float
    bubble: float
    waves: int

    @property
    def generation(self) -> float:
        return self.prefill + self.decode

    @property
    def total(self) -> float:
        return self.generation + self.logprobs + self.update + self.switch


def kv_bytes_per_token(arch: Architecture, itemsize: int = 2) -> int:
    """Keys and values of one token, all layers, all heads."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * itemsize


def decode_step(arch: Architecture, tp: int, batch: int, context: float, topology: Topology, itemsize: int = 2) -> float:
    """Seconds of one token for ``batch`` sequences of ``context`` tokens on ``tp`` GPUs."""
    weights = _active_parameters(arch) * itemsize / tp
    cache = batch * context * kv_bytes_per_token(arch, itemsize) / min(tp, arch.num_kv_heads)
    memory = (weights + cache) / (topology.memory_gb_per_s * 1e9 * DECODE_BANDWIDTH)
    compute = 2 * _active_parameters(arch) * batch / tp / (topology.peak_tflops * 1e12 * PREFILL_EFFICIENCY)
    fixed = arch.num_layers * DECODE_LAYER_SECONDS
    return max(memory, compute) + fixed + arch.num_layers * _all_reduces(arch, tp, batch, itemsize, topology)


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
    flops = share * forward_flops(arch, [work.prompt_len], 1)
    prefill = flops / gen.tp / (topology.peak_tflops * 1e12 * PREFILL_EFFICIENCY)
    prefill += arch.num_layers * _all_reduces(arch, gen.tp, share * work.prompt_len, itemsize, topology)

    forward = _forward_seconds(arch, train, topology, work, itemsize)
    micro = max(1, -(-work.sequences // (_dp(train) * work.micro_batch * work.optimizer_steps)))
    bubble = (train.pp - 1) / (micro * train.vpp)
    evaluated = 1 + work.reference + work.critic  # old log-probabilities, reference, values
    trained = (3 + (work.recompute == "full")) * (1 + work.critic)  # a backward pass costs two forward passes
    shared = _gradient_seconds(arch, train, topology, work, micro, evaluated, itemsize) * (1 + work.critic)
    return StepTime(
        prefill=prefill,
        decode=decode,
        logprobs=forward * evaluated * (1 + bubble),
        update=forward * trained * (1 + bubble) + shared,
        switch=switch,
        bubble=forward * trained * bubble,
        waves=waves,
    )


def _dp(train: TrainLayout) -> int:
    assert train.dp is not None
    return train.dp


def _active_parameters(arch: Architecture) -> int:
    """Parameters that a token passes through: everything in a dense model but the embedding, which is looked up."""
    embedding = 0 if arch.tied else arch.vocab_size * arch.hidden_size
    return arch.num_parameters - embedding


def _all_reduces(arch: Architecture, tp: int, tokens: float, itemsize: int, topology: Topology) -> float:
    """The two all-reduces of a layer over ``tokens``, in rings: 2 (tp - 1) / tp of the bytes out of every GPU."""
    if tp == 1:
        return 0.0
    inside = tp <= topology.gpus_per_node
    rate = topology.inside_gb_per_s if inside else topology.between_gb_per_s
    latency = topology.inside_latency_us if inside else topology.between_latency_us
    moved = 2 * (tp - 1) / tp * tokens * arch.hidden_size * itemsize
    return 2 * (latency * 1e-6 + moved / (rate * 1e9 * LINK_EFFICIENCY))


def _forward_seconds(arch: Architecture, train: TrainLayout, topology: Topology, work: Workload, itemsize: int) -> float:
    """One forward pass over all sequences, without bubbles: arithmetic, all-reduces, activations between stages."""
    tokens = work.tokens / _dp(train)
    flops = work.sequences / _dp(train) * forward_flops(arch, [work.length], work.response_len)
    arithmetic = flops / train.model_parallel / (topology.peak_tflops * 1e12 * TRAIN_EFFICIENCY)
    reduces = arch.num_layers / train.pp * _all_reduces(arch, train.tp, tokens, itemsize, topology)
    inside = train.model_parallel <= topology.gpus_per_node
    rate = topology.inside_gb_per_s if inside else topology.between_gb_per_s
    stages = 0.0 if train.pp == 1 else train.vpp * tokens * arch.hidden_size * itemsize / (rate * 1e9)
    return arithmetic + reduces + stages


def _gradient_seconds(
    arch: Architecture, train: TrainLayout, topology: Topology, work: Workload, micro: int, evaluated: int, itemsize: int
) -> float:
    """Gradients summed and weights gathered over data parallelism, and the optimiser, in all mini-batches.

    ZeRO-3 gathers the weights again for each pass over each micro-batch.
    """
    dp, local = _dp(train), arch.num_parameters / train.model_parallel
    part = local / (1 if train.zero == 0 else dp)
    optimizer = part * OPTIMIZER_BYTES / (topology.memory_gb_per_s * 1e9)
    if work.offload != "none":  # gradients go to the host, weights come back
        optimizer = part * (OPTIMIZER_BYTES / HOST_BANDWIDTH + 2 * itemsize / PCIE_BANDWIDTH)
    gathers = evaluated * micro + 2 * micro  # of the weights, under ZeRO-3
    fetched = gathers * part * itemsize / PCIE_BANDWIDTH if work.offload == "params" and train.zero == 3 else 0.0
    if dp == 1:
        return work.optimizer_steps * (optimizer + fetched)
    inside = train.model_parallel * dp <= topology.gpus_per_node
    rate = (topology.inside_gb_per_s if inside else _node_rate(train, topology)) * 1e9 * LINK_EFFICIENCY
    once = (dp - 1) / dp * local * itemsize / rate
    times = 1 + gathers if train.zero == 3 else 2  # gradients are reduced, and weights gathered
    return work.optimizer_steps * (times * once + optimizer + fetched)


def _node_rate(train: TrainLayout, topology: Topology) -> float:
    """GB/s of a data-parallel ring that leaves the node: its cards are shared by the rings that leave it.

    The ranks of one ring inside a node pass data on over fast links, so a ring may use the cards of all of them.
    """
    rings = min(train.model_parallel, topology.gpus_per_node)
    cards = topology.nics_per_node * topology.between_gb_per_s
    return min(topology.inside_gb_per_s, cards / rings)
