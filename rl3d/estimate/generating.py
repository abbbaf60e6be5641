"""Seconds of sampling on one replica: prompts in passes, then one captured step for each token."""

from rl3d.estimate import kernels
from rl3d.estimate.kernels import Sizes, all_reduce, head, layer_products, memory_seconds
from rl3d.estimate.topology import Topology
from rl3d.models import Architecture

ATTENTION = 0.40
"""Share of the peak rate that attention within a sequence reaches: a guess, it is a small part of everything measured."""
PASS_TOKENS = 8192
"""Prompt tokens of a pass, where nothing else is said (rollout.max_prefill_tokens)."""


def kv_bytes_per_token(arch: Architecture, itemsize: int = 2) -> int:
    """Keys and values of one token, all layers, all heads."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * itemsize


def decode_step(arch: Architecture, tp: int, batch: int, context: float, topology: Topology, itemsize: int = 2) -> float:
    """Seconds of one token for ``batch`` sequences of ``context`` tokens on ``tp`` GPUs.

    A layer reads its weights and the keys and values of all sequences; each of its kernels takes a fixed time beside
    that, and with ``tp`` > 1 two all-reduces follow each other and wait for the link's latency.
    """
    count = kernels.ROW_KERNELS if batch == 1 and tp == 1 else kernels.LAYER_KERNELS
    cache = batch * context * 2 * Sizes.of(arch, tp).key * itemsize
    layer = layer_products(arch, tp, batch, itemsize, topology) + memory_seconds(cache, topology)
    layer += count * kernels.KERNEL + 2 * all_reduce(arch, tp, batch, itemsize, topology)
    return arch.num_layers * layer + head(arch, tp, batch, itemsize, topology)


def prefill_pass(arch: Architecture, tp: int, tokens: float, length: int, topology: Topology, itemsize: int = 2) -> float:
    """Seconds of a pass over ``tokens`` tokens of prompts of ``length``, which the host launches kernel by kernel."""
    s = Sizes.of(arch, tp)
    # norms with their sums (reads 2, writes 2, twice), rotation and cache, attention, gate
    elements = 8 * s.hidden + (2 * s.query + 6 * s.key) + (2 * s.query + 2 * s.key) + 3 * s.ffn
    layer = layer_products(arch, tp, tokens, itemsize, topology) + memory_seconds(elements * tokens * itemsize, topology)
    layer += 2 * tokens * length * s.query / (topology.peak_tflops * 1e12 * ATTENTION)  # half of the square is masked
    layer += 2 * all_reduce(arch, tp, tokens, itemsize, topology)
    return arch.num_layers * max(layer, kernels.LAUNCH * (1.0 if tp == 1 else 1.5))


def prefill(arch: Architecture, tp: int, prompts: int, length: int, topology: Topology, itemsize: int = 2,
            pass_tokens: int = PASS_TOKENS) -> tuple[float, float]:  # fmt: skip
    """Seconds until the first of ``prompts`` prompts of ``length`` tokens has its first token, and until all have."""
    tokens = prompts * length
    passes = -(-tokens // max(pass_tokens, length))
    each = prefill_pass(arch, tp, tokens / passes, length, topology, itemsize)
    return each, passes * each
