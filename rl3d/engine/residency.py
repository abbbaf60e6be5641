"""Where tensors that are not always in use wait: on the device, or in host memory between their uses."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Residency:
    """Gives device memory back between uses, and keeps every view of it valid.

    The storages are emptied and filled again in place, so parameters, their views in a flat buffer and an optimiser's
    state stay the same tensors. Nothing may read them outside :meth:`resident`. Buffers in host memory are allocated once
    and used again; their contents are copied only after a change.

    Args:
        tensors: what to move, asked for each time: an optimiser's state appears with its first step.
        where: ``"device"`` leaves everything where it is; ``"host"`` moves it (pinned, when the device is a GPU);
            ``"drop"`` gives the memory back without keeping the contents, which come back as zeros.
        constant: the tensors never change, so the copy in host memory is made once.
        changed: a number that differs after every change of the tensors, where somebody counts them; by default they are
            taken to have changed in every use.
        at_once: leave now; otherwise with the first :meth:`leave`.

    Attributes:
        copied_bytes: bytes that were copied to host memory so far.

    Raises:
        ValueError: an unknown ``where``.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], where: str = "device", *, constant: bool = False,
                 changed: Callable[[], Any] | None = None, at_once: bool = True):  # fmt: skip
        if where not in ("device", "host", "drop"):
            raise ValueError(f"residency {where!r}: expected 'device', 'host' or 'drop'")
        self._tensors, self._where = tensors, where
        self._changed = (lambda: 0) if constant else changed
        self._buffers: dict[int, tuple[Any, Tensor | None, Any]] = {}  # storage, its buffer, the change it holds
        self._parked: list[tuple[Any, int]] = []
        self._away = False
        self._uses = 0
        self.copied_bytes = 0
        if at_once:
            self.leave()

    @property
    def away(self) -> bool:
        """Whether the tensors are away from the device now."""
        return self._away

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in host memory."""
        return sum(buffer.numel() for _, buffer, _ in self._buffers.values() if buffer is not None)

    def leave(self) -> int:
        """Give the device memory back, unless the tensors stay there or are in use; the bytes freed."""
        if self._where == "device" or self._away or self._uses:
            return 0
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors() if t.numel()}
        self._buffers = {key: held for key, held in self._buffers.items() if key in storages}
        if self._where == "host":
            self._save(storages)
        self._parked = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._parked:
            storage.resize_(0)
        self._away = True
        return sum(size for _, size in self._parked)

    def _save(self, storages: dict[int, Any]) -> None:
        now = self._changed() if self._changed is not None else object()
        for key, storage in storages.items():
            _, buffer, then = self._buffers.get(key, (storage, None, None))
            if buffer is None or buffer.numel() != storage.nbytes():
                buffer, then = _host_buffer(storage), None
            if then != now:
                buffer.copy_(_bytes(storage))
                self.copied_bytes += storage.nbytes()
            self._buffers[key] = (storage, buffer, now)

    def come(self) -> int:
        """Bring everything back; the bytes allocated. When memory does not suffice, everything is away as before."""
        if not self._away:
            return 0
        try:
            for storage, size in self._parked:
                storage.resize_(size)
        except Exception:
            for storage, _ in self._parked:
                storage.resize_(0)
            raise
        for storage, _ in self._parked:
            held = self._buffers.get(storage._cdata)
            if held is None or held[1] is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(held[1], non_blocking=True)
        self._away = False
        return sum(size for _, size in self._parked)

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


def _host_buffer(storage: Any) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
