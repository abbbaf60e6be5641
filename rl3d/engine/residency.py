"""Where a model that is not always in use waits: on the device, or in host memory between its uses."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Residency:
    """Gives device memory back between uses, and keeps every view of it valid.

    The storages are emptied and filled again in place, so parameters, their views in a flat buffer and an optimiser's
    state stay the same tensors. Nothing may read them outside :meth:`resident`.

    Args:
        tensors: what to move, asked for each time: an optimiser's state appears with its first step.
        where: ``"device"`` leaves everything where it is; ``"host"`` moves it (pinned, when the device is a GPU).
        constant: the tensors never change, so the copy in host memory is made once.

    Raises:
        ValueError: an unknown ``where``.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], where: str = "device", *, constant: bool = False):
        if where not in ("device", "host"):
            raise ValueError(f"residency {where!r}: expected 'device' or 'host'")
        self._tensors, self._where, self._constant = tensors, where, constant
        self._parked: list[tuple[Any, Tensor]] = []
        self._away = False
        self._uses = 0
        self.leave()

    @property
    def away(self) -> bool:
        """Whether the tensors are in host memory now."""
        return self._away

    def leave(self) -> None:
        """Move to host memory, unless the tensors stay on the device or are in use."""
        if self._where == "device" or self._away or self._uses:
            return
        if not (self._constant and self._parked):
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._tensors() if t.numel()}
            self._parked = [(s, _to_host(s)) for s in storages.values()]
        for storage, _ in self._parked:
            storage.resize_(0)
        self._away = True

    def come(self) -> None:
        """Bring everything back."""
        if not self._away:
            return
        for storage, saved in self._parked:
            storage.resize_(saved.numel())
            _bytes(storage).copy_(saved, non_blocking=True)
        if not self._constant:
            self._parked = []
        self._away = False

    @contextmanager
    def resident(self) -> Iterator[None]:
        """On the device while the block runs; blocks may nest."""
        self.come()
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self.leave()


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: Any) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_bytes(storage))
