"""Which of the two paths a tensor takes."""

import os
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch build without Triton: every kernel has its torch twin
    triton, tl = None, None

constexpr: Any = None if tl is None else tl.constexpr


def jit(function: Any) -> Any:
    """``triton.jit``, or the function itself where there is no Triton (it is then never called)."""
    return function if triton is None else triton.jit(function)


def use_triton(x: Tensor) -> bool:
    """Whether ``x`` goes to the Triton kernel: on CUDA, or anywhere when Triton's interpreter is on."""
    return triton is not None and (x.is_cuda or interpreted())


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. It has to be switched on before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def block_of(size: int, largest: int = 65536) -> int:
    """Power of two that covers ``size``, at most ``largest``."""
    return min(1 << max(size - 1, 0).bit_length(), largest)
