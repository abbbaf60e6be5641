"""Page-locked host memory at its size.

torch's allocator of page-locked memory rounds every buffer up to a power of two: the 13.5 GB of half a 7B model's fp32
weights become 17.2, and an offloaded optimiser has several such buffers. Newer torch can be told to leave large ones alone.
"""

import functools

_LARGE_MIB = 64
_SETTING = "pinned_max_round_threshold_mb"


@functools.cache
def take_exact_sizes() -> bool:
    """Tell torch to round no buffer above 64 MiB, unless the user's ``PYTORCH_ALLOC_CONF`` decides; whether it knows how."""
    import torch

    try:
        before = torch._C._accelerator_getAllocatorSettings()
        if _SETTING in before:
            return True
        try:
            # the whole string, since torch takes what it leaves out back to the default
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (before, f"{_SETTING}:{_LARGE_MIB}"))))
        except (ValueError, RuntimeError):  # a setting that this torch does not know
            torch._C._accelerator_setAllocatorSettings(before)
            return False
    except (AttributeError, ValueError, RuntimeError):
        return False
    return True


def page_locked_bytes(size: int) -> int:
    """Bytes of host memory that a page-locked buffer of ``size`` bytes takes with this torch."""
    if size > _LARGE_MIB << 20 and take_exact_sizes():
        return size
    return 1 << max(size - 1, 0).bit_length()
