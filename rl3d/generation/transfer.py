"""Small host data on its way to the device, without waiting for what the device computes.

torch copies pageable memory in step with the stream: a list of indices would wait for the forward pass before it.
"""

from typing import Any

import numpy as np
import torch


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list or array of numbers as a tensor on ``device``."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device, dtype)
    return tensor.pin_memory().to(device, dtype, non_blocking=True)
