"""Floating-point operations of a model, and what devices can do at most: the two sides of MFU.

Counted is what the mathematics needs (a product of [m, k] and [k, n] is 2mkn): causal attention looks at half of the
square, logits exist for predicted tokens only, and what is recomputed to save memory counts once.
"""

from collections.abc import Iterable

from rl3d.models.architecture import Architecture

# dense bf16 TFLOP/s from the makers' data sheets; the first entry whose words
# all occur in the device's name counts
_PEAKS = (
    (("GB200",), 2500.0), (("B200",), 2250.0), (("H200",), 989.0), (("H20",), 148.0), (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0), (("H100",), 989.0), (("H800",), 989.0), (("A100",), 312.0), (("A800",), 312.0),
    (("A10G",), 125.0), (("L40S",), 362.0), (("L40",), 181.0), (("L4",), 121.0), (("A40",), 149.7),
    (("RTX 4090",), 165.2), (("RTX 3090",), 71.2), (("V100",), 125.0),
)  # fmt: skip


# GB/s of device memory, from the same sheets
_BANDWIDTHS = (
    (("GB200",), 8000.0), (("B200",), 8000.0), (("H200",), 4800.0), (("H20",), 4000.0), (("H100", "PCIe"), 2000.0),
    (("H100", "NVL"), 3900.0), (("H100",), 3350.0), (("H800",), 3350.0), (("A100", "40GB"), 1555.0), (("A100",), 2039.0),
    (("A800",), 2039.0), (("A10G",), 600.0), (("L40S",), 864.0), (("L40",), 864.0), (("L4",), 300.0), (("A40",), 696.0),
    (("RTX 4090",), 1008.0), (("RTX 3090",), 936.0), (("V100",), 900.0),
)  # fmt: skip


def peak_bandwidth(device_name: str) -> float | None:
    """Bytes per second of a GPU's memory by the name that CUDA gives it; ``None`` for one that is not known."""
    return next((1e9 * rate for words, rate in _BANDWIDTHS if all(word in device_name for word in words)), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it; ``None`` for one that is not known (or no GPU)."""
    for words, tflops in _PEAKS:
        if all(word in device_name for word in words):
            return tflops * 1e12
    return None


def forward_flops(arch: Architecture, lengths: Iterable[int], predicted: int) -> float:
    """Operations of one forward pass over sequences of ``lengths`` tokens, with logits for ``predicted`` of them."""
    lengths = list(lengths)
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    heads = arch.num_heads * arch.head_dim
    projections = arch.hidden_size * (arch.qkv_rows + heads) + 3 * arch.hidden_size * arch.ffn_size
    attention = 2 * squares * heads  # QK^T and PV, 2 squares each, half of it masked away
    layers = arch.num_layers * (2.0 * projections * tokens + attention)
    return layers + 2.0 * arch.vocab_size * arch.hidden_size * predicted


def training_flops(arch: Architecture, lengths: Iterable[int], predicted: int) -> float:
    """Forward and backward: three times the forward pass."""
    return 3 * forward_flops(arch, lengths, predicted)
