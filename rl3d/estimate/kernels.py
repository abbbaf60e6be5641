"""Seconds of what a layer is made of, on one rank: matrix products, passes over memory, collectives, launches.

First principles with a few constants: arithmetic at a share of the peak, bytes at a share of the memory's rate, and a
fixed time for whatever is started. The constants are one fit to a part of what was measured on one and two H200s
(docs/gpus.md); ``tests/estimate/measured.py`` says which part, and how far the rest is off.
"""

import math
from dataclasses import dataclass

from rl3d.estimate.topology import Topology
from rl3d.models import Architecture

PRODUCT = 0.675
"""Share of the peak bf16 rate that a large matrix product reaches."""
MEMORY = 0.91
"""Share of the memory's rate that reading weights, keys and activations reaches."""
OVERLAP = 0.51
"""Part of the shorter of a product's arithmetic and its traffic that runs beside the longer. With operands as thin as one
side of a product cut by tensor parallelism, traffic is what makes it slower than its arithmetic."""
KERNEL = 3.5e-6
"""A small kernel in a captured graph, from the end of the one before to its own."""
LAYER_KERNELS, ROW_KERNELS = 10, 6
"""Kernels of a decode step in a layer (:mod:`rl3d.generation.fused`), and those made for one row on one GPU."""
LAUNCH = 0.60e-3
"""Host time of a layer that is launched kernel by kernel; its all-reduces cost half as much again."""
COLLECTIVE = 0.80
"""Share of a link's rate that large collectives reach, NVLink multicast off ..."""
SMALL_COLLECTIVE = 0.50
"""... and of that the protocol that small ones take, which has no ..."""
COLLECTIVE_START = 185e-6
"""... seconds until a large one runs at its rate."""
BUCKET = 100e6
"""Bytes of gradients or weights that ZeRO sends at once: 50 million elements in bf16."""


@dataclass(frozen=True)
class Sizes:
    """Widths of one rank's part of a layer, in elements: hidden (whole), query heads, key heads, feed-forward."""

    hidden: int
    query: float
    key: float
    ffn: float

    @classmethod
    def of(cls, arch: Architecture, tp: int) -> "Sizes":
        key = max(arch.num_kv_heads / tp, 1) * arch.head_dim
        return cls(arch.hidden_size, arch.num_heads * arch.head_dim / tp, key, arch.ffn_size / tp)


def memory_seconds(nbytes: float, topology: Topology) -> float:
    """Seconds of reading or writing so many bytes of device memory."""
    return nbytes / (topology.memory_gb_per_s * 1e9 * MEMORY)


def product(rows: float, inner: float, columns: float, itemsize: int, topology: Topology) -> float:
    """Seconds of a product [rows, inner] x [inner, columns]: arithmetic, and operands and result over memory."""
    arithmetic = 2 * rows * inner * columns / (topology.peak_tflops * 1e12 * PRODUCT)
    traffic = memory_seconds(itemsize * (rows * inner + inner * columns + rows * columns), topology)
    return max(arithmetic, traffic) + (1 - OVERLAP) * min(arithmetic, traffic)


def layer_products(arch: Architecture, tp: int, rows: float, itemsize: int, topology: Topology) -> float:
    """Seconds of a layer's four products over ``rows`` tokens."""
    s = Sizes.of(arch, tp)
    shapes = ((s.hidden, s.query + 2 * s.key), (s.query, s.hidden), (s.hidden, 2 * s.ffn), (s.ffn, s.hidden))
    return sum(product(rows, inner, columns, itemsize, topology) for inner, columns in shapes)


def head(arch: Architecture, tp: int, rows: float, itemsize: int, topology: Topology) -> float:
    """Seconds of the logits of ``rows`` tokens: the product, and fp32 logits written and read once."""
    columns = arch.vocab_size / tp
    return product(rows, arch.hidden_size, columns, itemsize, topology) + memory_seconds(8 * rows * columns, topology)


def collective(nbytes: float, ranks: int, topology: Topology, messages: float = 1.0) -> float:
    """Seconds of a reduce-scatter or an all-gather of ``nbytes`` in all over ``ranks`` neighbours.

    A rank sends (ranks - 1) / ranks of the bytes; ``messages`` are what they are cut into. Small ones wait for the latency
    of log2(ranks) exchanges, large ones for their start.
    """
    if ranks == 1:
        return 0.0
    inside = ranks <= topology.gpus_per_node
    rate = 1e9 * COLLECTIVE * (topology.inside_gb_per_s if inside else topology.between_gb_per_s)
    latency = 1e-6 * (topology.inside_latency_us if inside else topology.between_latency_us)
    travel = (ranks - 1) / ranks * nbytes / rate
    start = COLLECTIVE_START * messages / 2
    return latency * math.log2(ranks) * messages / 2 + min(travel / SMALL_COLLECTIVE, start + travel)


def all_reduce(arch: Architecture, tp: int, tokens: float, itemsize: int, topology: Topology) -> float:
    """Seconds of summing the hidden states of ``tokens`` over ``tp`` ranks: there and back."""
    return 2 * collective(tokens * arch.hidden_size * itemsize, tp, topology)
