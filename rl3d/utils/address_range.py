"""Address space without memory, and memory under parts of it: what keeps its address may come and go.

A range of addresses is reserved once. Memory is mapped under pieces of it and given back, and what comes back is at the
addresses of before: tensors over the range, and whatever remembers their addresses, stay good. Pieces without memory may not
be touched, on the CPU that is a segmentation fault, on a GPU an illegal access.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

Piece = tuple[int, int]
"""(offset from the range's beginning, bytes), multiples of the granularity."""


def rounded(nbytes: int, granularity: int) -> int:
    """The next multiple of ``granularity``."""
    return -(-nbytes // granularity) * granularity


class AddressRange:
    """Addresses ``[address, address + rows * row_bytes)``; given up when the range and all tensors over it are gone.

    Subclasses reserve the addresses, for rows of so many bytes at least, and map one piece.

    Attributes:
        granularity: what is mapped begins and ends at multiples of so many bytes, and so does every row.
        zeroed: whether memory is all zeros when it has just been mapped.
        mapped: the pieces that have memory.
    """

    zeroed = False

    def __init__(self, address: int, rows: int, row_bytes: int, granularity: int) -> None:
        self.address, self.rows, self.row_bytes, self.granularity = address, rows, row_bytes, granularity
        self.mapped: list[Piece] = []

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self.rows * self.row_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory under the range."""
        return sum(size for _, size in self.mapped)

    def map(self, pieces: Sequence[Piece]) -> None:
        """Put memory under pieces that have none; under all of them, or under none.

        Raises:
            MemoryError: there is not so much.
            OSError or rl3d.utils.cuda_memory.DriverError: the system refused for another reason.
        """
        done: list[Piece] = []
        try:
            for piece in pieces:
                self._map(piece)
                done.append(piece)
        except BaseException:
            for piece in done:
                self._unmap(piece)
            raise
        self.mapped += done
        self._changed(sum(size for _, size in done))

    def unmap(self) -> int:
        """Give back all memory under the range, and its contents; the bytes. Nothing may be using it."""
        before = self.mapped_bytes
        try:
            while self.mapped:
                self._unmap(self.mapped[-1])
                self.mapped.pop()
        finally:
            self._changed(self.mapped_bytes - before)
        return before

    def tensor(self) -> torch.Tensor:
        """All of the range as bytes, uint8 [nbytes]. It keeps the range, and owns no memory."""
        raise NotImplementedError

    def _map(self, piece: Piece) -> None:
        raise NotImplementedError

    def _unmap(self, piece: Piece) -> None:
        raise NotImplementedError

    def _changed(self, nbytes: int) -> None:
        """So many bytes more (or less) are mapped now."""


class HostRange(AddressRange):
    """Of host memory: pages that may not be touched until they are mapped, and are really gone when they are unmapped.

    Raises OSError where the system has no such addresses.
    """

    zeroed = True

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._libc = _libc()
        row_bytes = rounded(row_bytes, mmap.PAGESIZE)
        nbytes = rows * row_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        address = self._libc.mmap(None, nbytes, _NONE, flags, -1, 0)
        if address is None or address == _FAILED:
            raise _error(f"reserving {nbytes} bytes of address space")
        super().__init__(address, rows, row_bytes, mmap.PAGESIZE)
        weakref.finalize(self, self._libc.munmap, address, nbytes).atexit = False

    def tensor(self) -> torch.Tensor:
        buffer = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        buffer.owner = self  # type: ignore[attr-defined]  # torch keeps the buffer as long as any tensor over it
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _map(self, piece: Piece) -> None:
        self._protect(piece, mmap.PROT_READ | mmap.PROT_WRITE)

    def _unmap(self, piece: Piece) -> None:
        offset, size = piece
        if self._libc.madvise(self.address + offset, size, mmap.MADV_DONTNEED):
            raise _error(f"giving back {size} bytes")
        self._protect(piece, _NONE)

    def _protect(self, piece: Piece, protection: int) -> None:
        offset, size = piece
        if self._libc.mprotect(self.address + offset, size, protection):
            error = _error(f"mapping {size} bytes")
            raise MemoryError(str(error)) if error.errno == _ENOMEM else error


_NONE, _NORESERVE, _ENOMEM = 0, 0x4000, 12  # PROT_NONE, MAP_NORESERVE and ENOMEM of Linux
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [place, size, number, number, number, ctypes.c_long], place
    libc.munmap.argtypes = [place, size]
    libc.mprotect.argtypes = libc.madvise.argtypes = [place, size, number]
    return libc


def _error(action: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{action}: {os.strerror(number)}")
