"""Stateless noise: the random number of a (sequence, position, vocabulary entry) is a hash of those, nothing else.

Sampling by Gumbel-max needs one independent exponential variable E per vocabulary entry: ``argmax(logit - log E)`` is
a draw from ``softmax(logits)`` (Gumbel 1954; Maddison et al., "A* sampling", 2014). Because E is a pure function of
(run seed, step, prompt id, sample id, position, vocabulary id), tokens do not depend on the batch, its order, the page
size or the number of ranks, and a vocabulary shard draws its own part without talking to the others.

All arithmetic is wrap-around int64, which torch computes identically on CPU and CUDA. Right shifts in torch are
arithmetic; they are made logical with a mask. Uniforms carry 63 bits, converted to fp32 only after the hash: the
conversion rounds to 24 significant bits *relative* to the value, and the small values are the ones that decide a draw.
"""

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of splitmix64
_MUL1 = 0xBF58476D1CE4E5B9  # splitmix64 finaliser (Steele, Lea, Flood, 2014)
_MUL2 = 0x94D049BB133111EB
_POSITION = 0xD6E8FEB86659FD93  # odd multipliers that keep position and vocabulary id on different lattices
_VOCABULARY = 0xA0761D6478BD642F
_SALT = 0x5851F42D4C957F2D  # so that all-zero inputs do not hash to zero


def _signed(value: int) -> int:
    """A 64-bit pattern as the python int that torch's int64 takes."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


HASH = (_signed(_POSITION), _signed(_MUL1), _signed(_MUL2))
"""Multipliers of :func:`log_exponentials` for kernels that compute the same: of positions, and of the two rounds."""


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_int(value: int) -> int:
    """splitmix64 finaliser on a python int; result in [0, 2**64)."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK64
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK64
    return value ^ (value >> 31)


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 finaliser on int64 of any shape; the same bits as :func:`mix_int`."""
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return x ^ _shift(x, 31)


def sequence_key(seed: int, step: int, prompt_id: int, sample_id: int) -> int:
    """The 64-bit key of one sequence, as a signed int. Order matters: (1, 0) and (0, 1) differ."""
    key = _SALT
    for value in (seed, step, prompt_id, sample_id):
        key = mix_int((key + _GOLDEN) ^ mix_int(value + _SALT))
    return _signed(key)


def vocabulary_keys(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Keys of the vocabulary ids ``start .. stop - 1``, int64 [stop - start]; computed once per shard."""
    ids = torch.arange(start, stop, dtype=torch.int64, device=device)
    return mix(ids * _signed(_VOCABULARY) + _signed(_SALT))


def log_exponentials(keys_B: torch.Tensor, positions_B: torch.Tensor, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """Logarithm of standard exponential variables, fp32 [B, V]; minus this is standard Gumbel noise.

    ``keys_B`` are :func:`sequence_key`, ``positions_B`` the index in the sequence of the token being drawn (both int64
    [B]), ``vocabulary_V`` is :func:`vocabulary_keys`. The result lies in [-43.7, 2.82].
    """
    rows_B = mix(keys_B + positions_B * _signed(_POSITION))
    # Both sides are fully mixed already, so one more non-linear round joins them. Only the high bits are used.
    x = rows_B[:, None] ^ vocabulary_V[None, :]
    x *= _signed(_MUL1)
    x ^= (x >> 32) & 0xFFFFFFFF
    x *= _signed(_MUL2)
    x &= (1 << 63) - 1
    # The upper limit matters: a u that rounds to 1 would make E infinite and let the most hopeless entry win.
    uniform = x.to(torch.float32).mul_(2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)
    # E = -log(1 - u) keeps full relative precision at small E, where the winners are; -log(u) would not.
    return uniform.neg_().log1p_().neg_().log_()
