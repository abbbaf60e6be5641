"""Bytes that a forward pass of our modules leaves behind for its backward pass, and needs while it runs.

Counted from what autograd saves (``torch.autograd.graph.saved_tensors_hooks`` sees exactly these), storage by storage.
H hidden, F feed-forward, Q query heads x head size, K key/value heads x head size, D head size, b bytes of an element;
Q, K and F are a rank's share. Korthikanti et al. 2022 (arXiv:2205.05198) count the same way for GPT's layers; ours differ
in norm, gate and attention kernel.
"""

from dataclasses import dataclass

from rl3d.estimate.settings import MemorySettings
from rl3d.models import Architecture

FP32 = 4


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for each token of a row, on one rank.

    Attributes:
        layer: saved by one layer, to be there when its backward pass begins.
        kept: saved by one layer between its forward and its backward pass: all of it, or less when recomputing.
        ends: saved beside the layers: by the final norm, by the rotary tables, indices.
        backward: working memory of the backward pass beyond what is saved.
        forward: working memory of a forward pass without gradients.
        hidden: the hidden state itself, whole.
    """

    layer: float
    kept: float
    ends: float
    backward: float
    forward: float
    hidden: float


def token_bytes(arch: Architecture, tp: int, settings: MemorySettings) -> TokenBytes:
    """Per-token bytes of the training modules on one of ``tp`` ranks."""
    b, h = settings.element, arch.hidden_size
    f = arch.ffn_size / tp
    share = 1 / tp if settings.sequence_parallel else 1.0  # of the row that norms and residuals of a rank see
    norms = 2 * share * (2 * h * b + FP32)  # each: its input, its output (a linear's input), 1 / rms
    if arch.post_norm:  # after a linear: its output, in fp32 where rounding comes late; the linears read the residual
        norms = 2 * share * ((FP32 if settings.bf16 else b) * h + h * b + FP32)
    layer = norms + _attention(arch, tp, settings) + 3 * f * b
    kept = layer
    if settings.recompute == "selective":
        kept = norms + _checkpointed_attention(arch, tp, settings) + 3 * f * b
    elif settings.recompute == "full":
        kept = h * b * share
    # SwiGLU's backward pass: the gradient of gate and up; without the fused kernel fp32 copies and intermediates as well
    gate = 2 * f * b if settings.fused else 32 * f if settings.bf16 else 24 * f
    forward = (3 if settings.fused else 4) * f * b + 4 * h * b * share
    last_norm = (FP32 if arch.post_norm and settings.bf16 else b) * h + FP32
    return TokenBytes(
        layer=layer, kept=kept, ends=share * last_norm + arch.head_dim * FP32 + 8,
        backward=gate + h * b, forward=forward, hidden=h * b,
    )  # fmt: skip


def _sizes(arch: Architecture, tp: int) -> tuple[float, float, float]:
    """(Q, K, query heads) of a rank."""
    return arch.num_heads * arch.head_dim / tp, max(arch.num_kv_heads / tp, 1) * arch.head_dim, arch.num_heads / tp


def _attention(arch: Architecture, tp: int, settings: MemorySettings) -> float:
    """Rotated query and key, value, output, and the log-sum-exp of each row of scores."""
    q, k, heads = _sizes(arch, tp)
    b = settings.element
    extra = FP32 * heads + _qk_norm(arch, tp, settings)
    if settings.varlen == "native":  # one kernel over the packed row
        return (2 * q + 2 * k) * b + extra
    if settings.varlen == "repeated":  # keys and values repeated for every query head
        return 4 * q * b + extra
    # one call for each sequence: the value is a view of the whole projection, outputs are joined by a copy
    return (3 * q + k + _projection(arch, tp)) * b + extra


def _checkpointed_attention(arch: Architecture, tp: int, settings: MemorySettings) -> float:
    """With core attention recomputed: its inputs, which share the projection's storage as far as they are views of it,
    and its output, which is the next linear's input."""
    q, k, _ = _sizes(arch, tp)
    norm = _qk_norm(arch, tp, settings)
    inputs = q + k if norm else 0.0 if arch.num_kv_heads <= tp else q
    return (q + inputs + _projection(arch, tp)) * settings.element + norm


def _projection(arch: Architecture, tp: int) -> float:
    """Elements of the fused QKV projection on a rank; with fewer key heads than ranks, it is gathered."""
    q, k, _ = _sizes(arch, tp)
    return arch.qkv_rows if arch.num_kv_heads < tp else q + 2 * k


def _qk_norm(arch: Architecture, tp: int, settings: MemorySettings) -> float:
    q, k, heads = _sizes(arch, tp)
    if arch.qk_norm == "head":  # its input and 1 / rms of each head
        return (q + k) * settings.element + FP32 * (heads + k / arch.head_dim)
    if arch.qk_norm == "projection":  # plain torch in fp32: the input (or a view), the normalised value, 1 / rms
        copies = 1 if not settings.bf16 and arch.num_kv_heads <= tp else 2
        return copies * (q + k) * FP32 + 2 * FP32
    return 0.0
