"""Pools at fixed addresses whose memory comes and goes: what captured CUDA graphs of decode steps need.

A step that was captured reads and writes the addresses of its capture. Here the addresses are reserved once for the largest
pool that there can be; a beginning of every row has memory while tokens are generated, none has while training. Tensors over
the rows never change, with however much memory: only what is mapped may be touched.
"""

import logging

import torch

from rl3d.distributed.devices import host_memory
from rl3d.generation.engine import GenerationError
from rl3d.kernels.backend import interpreted
from rl3d.utils import device_memory
from rl3d.utils.address_range import AddressRange, HostRange, Piece, rounded
from rl3d.utils.cuda_memory import DeviceRange, DriverError

_log = logging.getLogger(__name__)


class ElasticRows:
    """The rows of a range of addresses, with memory under a beginning of each.

    Attributes:
        bytes: uint8 [rows, row_bytes], the same tensor always; only ``[:, :mapped_row]`` may be touched.
        mapped_row: bytes of each row that have memory.
    """

    def __init__(self, addresses: AddressRange, device: torch.device) -> None:
        self._addresses, self.device, self.mapped_row = addresses, device, 0
        # torch looks at the memory under a tensor when it is made; and whether all of this works had better be known now
        self._map([(0, addresses.granularity)])
        self.bytes = addresses.tensor().view(addresses.rows, addresses.row_bytes)
        self.bytes[0, :1].zero_()
        self._wait()
        addresses.unmap()

    @property
    def nbytes(self) -> int:
        """Bytes of memory under all rows."""
        return self._addresses.rows * self.mapped_row

    def rounded(self, row_bytes: int) -> int:
        """``row_bytes``, as far as memory must be mapped for them."""
        return rounded(row_bytes, self._addresses.granularity)

    def hold(self, row_bytes: int) -> int:
        """Have memory under so many bytes of each row at least; what was there keeps its contents, what comes is zeros.

        Returns the bytes newly mapped.

        Raises:
            MemoryError: there is not so much; everything is as before.
        """
        start, end, rows = self.mapped_row, self.rounded(row_bytes), self._addresses.rows
        if end <= start:
            return 0
        self._map([(row * self._addresses.row_bytes + start, end - start) for row in range(rows)])
        self.mapped_row = end
        if not self._addresses.zeroed:
            for row in self.bytes:
                row[start:end].zero_()
        return rows * (end - start)

    def release(self) -> int:
        """Give all memory back, and what it holds; waits for whatever uses it. Returns the bytes."""
        if self.mapped_row:
            self._wait()
        self.mapped_row = 0
        return self._addresses.unmap()

    def _map(self, pieces: list[Piece]) -> None:
        if self.device.type != "cuda":
            return self._addresses.map(pieces)
        device_memory.make_room(self.device, sum(size for _, size in pieces))
        try:
            self._addresses.map(pieces)
        except MemoryError:  # torch may keep what is missing, unused
            torch.cuda.empty_cache()
            self._addresses.map(pieces)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def elastic_rows(rows: int, row_bytes: int, device: torch.device) -> ElasticRows | None:
    """Rows at addresses of their own, or ``None``, and a line in the log, where the system does not give them."""
    if device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cpu" and interpreted():
        return None  # Triton's interpreter copies whole storages onto themselves, what has no memory included
    try:
        if device.type == "cpu":
            return ElasticRows(HostRange(rows, row_bytes), device)
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch's context
            here = torch.device("cuda", torch.cuda.current_device())
            return ElasticRows(DeviceRange(rows, row_bytes, here.index), here)
    except MemoryError as error:
        raise refusal(rows * row_bytes, "its first page", device, error) from error
    except (DriverError, OSError, RuntimeError, AttributeError) as error:
        _log.warning(
            "%s has no addresses that stay (%s): the key/value cache takes its memory from torch, and on a GPU decode steps "
            "are captured again whenever it comes back", device, error,
        )  # fmt: skip
        return None


def refusal(wanted: int, what: str, device: torch.device, error: BaseException) -> GenerationError:
    """What to say when ``wanted`` bytes for ``what`` are not to be had."""
    free = device_memory.available_bytes(device) if device.type == "cuda" else host_memory()
    there = "" if free is None else f", {free / 1e9:.2f} GB of {device} are free"
    return GenerationError(
        f"the key/value cache wants {wanted / 1e9:.2f} GB more for {what}{there} ({error}); lower rollout.max_sequences or "
        f"max_new_tokens, raise the generation layout's tp, or use rollout.cache_strategy: lightweight"
    )
