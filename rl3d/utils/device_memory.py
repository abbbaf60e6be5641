"""Memory of GPUs that this process has mapped beside torch's allocator, in the places where only torch's would be counted.

A cap that is set on torch's allocator (``torch.cuda.set_per_process_memory_fraction``) is meant for the process: as long
as memory is mapped beside it, torch may take so much less. Peaks of torch's allocator are of the same intervals: whoever
adds up both is told before what is mapped changes (:func:`watch`).
"""

import weakref
from typing import Any, Protocol

_mapped: dict[int, int] = {}  # by the GPU's number
_caps: dict[int, tuple[float, float]] = {}  # of torch's allocator, as shares: what the process may have; what we made of it


class Watcher(Protocol):
    def collect(self) -> None:
        """Take note of the peak of torch's allocator up to now; it starts anew afterwards."""
        ...


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """Tell ``watcher`` before what is mapped changes, as long as it lives."""
    _watchers.add(watcher)


def mapped_bytes(device: Any) -> int:
    """Bytes mapped beside torch's allocator on a device, as ``torch.device``, text or number; 0 on a CPU."""
    return _mapped.get(_number(device), 0)


def mapped_changes(ordinal: int, nbytes: int) -> None:
    """So many bytes more (or less) have been mapped on GPU ``ordinal``."""
    import torch

    if not nbytes:
        return
    if torch.cuda.is_initialized():
        for watcher in list(_watchers):
            watcher.collect()
        if _watchers:
            torch.cuda.reset_peak_memory_stats(ordinal)
    _mapped[ordinal] = _mapped.get(ordinal, 0) + nbytes
    if torch.cuda.is_initialized():
        _lower_cap(ordinal)


def cap_bytes(device: Any) -> int | None:
    """What this process may allocate and map on a GPU where torch's allocator has been given a cap, else ``None``."""
    import torch

    ordinal = _number(device)
    share = _share(ordinal)
    return None if share is None else int(share * torch.cuda.get_device_properties(ordinal).total_memory)


def available_bytes(device: Any, wanted: float = 0) -> int:
    """Bytes that can be mapped on a GPU now, within the cap if there is one.

    Where they are fewer than ``wanted``, torch gives back first what it keeps and nobody uses.
    """
    import torch

    def free() -> int:
        on_device, cap = torch.cuda.mem_get_info(device)[0], cap_bytes(device)
        if cap is None:
            return on_device
        return max(0, min(on_device, cap - torch.cuda.memory_reserved(device) - mapped_bytes(device)))

    found = free()
    if found < wanted and torch.cuda.memory_reserved(device) > torch.cuda.memory_allocated(device):
        torch.cuda.empty_cache()
        found = free()
    return found


def make_room(device: Any, nbytes: int) -> None:
    """Let torch give back what it keeps unused, if ``nbytes`` more would be beyond the cap otherwise.

    Raises:
        MemoryError: they are all the same.
    """
    import torch

    cap = cap_bytes(device)
    if cap is None:
        return
    limit = cap - mapped_bytes(device) - nbytes
    if torch.cuda.memory_reserved(device) > limit:
        torch.cuda.empty_cache()
    if (held := torch.cuda.memory_reserved(device)) > limit:
        raise MemoryError(
            f"the process may have {cap / 1e9:.2f} GB of {device}; torch holds {held / 1e9:.2f} and "
            f"{mapped_bytes(device) / 1e9:.2f} are mapped"
        )


def _number(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _share(ordinal: int) -> float | None:
    """The share of a GPU that this process may have, whoever said so; ``None``: all."""
    import torch

    now = torch.cuda.get_per_process_memory_fraction(ordinal)
    if ordinal in _caps and abs(now - _caps[ordinal][1]) < 1e-7:
        return _caps[ordinal][0]
    _caps.pop(ordinal, None)  # set by somebody since, and then meant for the process
    return None if now >= 1.0 else now


def _lower_cap(ordinal: int) -> None:
    """torch's allocator gets what the cap leaves beside what is mapped."""
    import torch

    share = _share(ordinal)
    if share is None:
        return
    total = torch.cuda.get_device_properties(ordinal).total_memory
    rest = min(max(share - _mapped[ordinal] / total, 0.0), 1.0)
    torch.cuda.set_per_process_memory_fraction(rest, ordinal)
    _caps[ordinal] = (share, rest)
