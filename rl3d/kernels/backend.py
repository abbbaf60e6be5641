"""Which of the two paths a tensor takes."""

import os
from functools import lru_cache
from typing import Any

import torch
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


def overlap(device: torch.device) -> dict[str, bool]:
    """Launch options with which a kernel that calls :func:`begin` starts while the one before it in the stream ends."""
    return dict(_overlap(device))


@lru_cache
def _overlap(device: torch.device) -> tuple[tuple[str, bool], ...]:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        return ("OVERLAP", True), ("launch_pdl", True)
    return (("OVERLAP", False),)


@jit
def begin(OVERLAP: constexpr):
    """The next kernel of the stream may be set up; wait until all that the one before has written is to be seen.

    CUDA's programmatic dependent launch: a decode step is some 300 kernels of a few microseconds, of which setting up and
    winding down are a good part. Before this call a kernel may read only what no kernel of the step writes: weights.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def block_of(size: int, largest: int = 65536) -> int:
    """Power of two that covers ``size``, at most ``largest``."""
    return min(1 << max(size - 1, 0).bit_length(), largest)
