"""Which dtype an actor computes in."""

import torch

DEFAULT_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""What ``dtype="auto"`` means on each kind of device."""


def dtype_of(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that is meant. Raises :class:`ValueError` for one that is not supported."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return DEFAULT_DTYPES.get(device.type, torch.float32)
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype {dtype!r} is not supported; expected 'auto', 'bfloat16' or 'float32'")
    return getattr(torch, dtype)
