"""Bytes of tensor storage alive at a time, on any device: what ``torch.cuda.max_memory_allocated`` says on CUDA."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Meter(TorchDispatchMode):
    """Inside ``with meter:`` every storage that an operation makes is counted until it is gone.

    Attributes:
        now, peak: bytes alive, and the most since :meth:`reset`.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self._live: dict[int, Any] = {}
        self.now = self.peak = 0
        for tensor in known:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a storage that was made outside."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return

        def gone(_: Any) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def reset(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return out


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps for the backward pass, each storage once, those of ``parameters`` left out."""

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self._own = {p.untyped_storage()._cdata for p in parameters}
        self._seen: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._seen[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._seen.values())
