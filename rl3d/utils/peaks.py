"""Most device memory in use during each phase: torch's allocator and what is mapped beside it; nothing on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from rl3d.utils import device_memory


class PhasePeaks:
    """Peaks of allocated and mapped bytes by phase, over all uses of a phase so far.

    Args:
        device: of this rank, as text or :class:`torch.device`.

    Attributes:
        phases: name -> bytes.
    """

    def __init__(self, device: object) -> None:
        self._device = str(device)
        self.phases: dict[str, int] = {}
        self._overall = self._since = 0
        if self._device.startswith("cuda"):
            device_memory.watch(self)

    @property
    def overall(self) -> int:
        """Most bytes allocated and mapped since the start, inside phases or not; 0 on a CPU."""
        self.collect()
        return self._overall

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as ``name``."""
        if not self._device.startswith("cuda"):
            yield
            return
        import torch

        self.collect()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._since = 0
        try:
            yield
        finally:
            self.collect()
            self.phases[name] = max(self.phases.get(name, 0), self._since)

    def collect(self) -> None:
        """The counter is reset by every phase and whenever what is mapped changes: keep what it says now."""
        if self._device.startswith("cuda"):
            import torch

            now = torch.cuda.max_memory_allocated(self._device) + device_memory.mapped_bytes(self._device)
            self._since, self._overall = max(self._since, now), max(self._overall, now)
