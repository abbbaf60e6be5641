"""Most device memory in use during each phase, measured by torch's allocator; nothing on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager


class PhasePeaks:
    """Peaks of allocated bytes by phase, over all uses of a phase so far.

    Args:
        device: of this rank, as text or :class:`torch.device`.

    Attributes:
        phases: name -> bytes.
    """

    def __init__(self, device: object) -> None:
        self._device = str(device)
        self.phases: dict[str, int] = {}
        self._overall = 0

    @property
    def overall(self) -> int:
        """Most bytes allocated since the start, inside phases or not; 0 on a CPU."""
        self._collect()
        return self._overall

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as ``name``."""
        if not self._device.startswith("cuda"):
            yield
            return
        import torch

        self._collect()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self.phases[name] = max(self.phases.get(name, 0), torch.cuda.max_memory_allocated(self._device))
            self._collect()

    def _collect(self) -> None:
        """The counter is reset by every phase: keep what it says now."""
        if self._device.startswith("cuda"):
            import torch

            self._overall = max(self._overall, torch.cuda.max_memory_allocated(self._device))
