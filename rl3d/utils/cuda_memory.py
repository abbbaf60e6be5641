"""Memory under fixed addresses of a GPU: the virtual memory management of CUDA's driver, called through ctypes.

CUDA driver API, "Virtual Memory Management": addresses are reserved; physical memory is created, mapped and made accessible,
and freed with its last mapping once its handle has been released.
"""

import ctypes
import weakref
from functools import lru_cache
from typing import Any

import torch

from rl3d.utils import device_memory
from rl3d.utils.address_range import AddressRange, Piece, rounded

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # of the enumerations in cuda.h; tests compare them with it
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_OUT_OF_MEMORY = 2


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = [
        ("compressionType", ctypes.c_ubyte), ("gpuDirectRDMACapable", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int), ("requestedHandleTypes", ctypes.c_int), ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p), ("allocFlags", AllocationFlags),
    ]  # fmt: skip


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", MemLocation), ("flags", ctypes.c_int)]


class DriverError(RuntimeError):
    """A call of CUDA's driver failed; the message has the call and the error's name."""


class Driver:
    """The calls that are needed, of ``library``; a failed one raises. Raises OSError where there is no such library."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        pointer, size, flags = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong
        reference: Any = ctypes.c_void_p
        arguments = {
            "cuGetErrorName": [ctypes.c_int, reference],
            "cuDeviceGet": [reference, ctypes.c_int],
            "cuDeviceGetAttribute": [reference, ctypes.c_int, ctypes.c_int],
            "cuMemGetAllocationGranularity": [reference, reference, ctypes.c_int],
            "cuMemAddressReserve": [reference, size, size, pointer, flags],
            "cuMemAddressFree": [pointer, size],
            "cuMemCreate": [reference, size, reference, flags],
            "cuMemRelease": [flags],
            "cuMemMap": [pointer, size, size, flags, flags],
            "cuMemSetAccess": [pointer, size, reference, size],
            "cuMemUnmap": [pointer, size],
        }
        for name, types in arguments.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, ctypes.c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call ``name``; MemoryError where memory is short, DriverError for anything else that is no success."""
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = f"{name}: {self._name(code)}"
        raise MemoryError(text) if code == _OUT_OF_MEMORY else DriverError(text)

    def _name(self, code: int) -> str:
        found = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.addressof(found)) or found.value is None:
            return f"error {code}"
        return found.value.decode()


@lru_cache
def cuda_driver() -> Driver:
    """CUDA's driver in this process."""
    return Driver()


class DeviceRange(AddressRange):
    """Of a GPU's memory; torch has a context there already.

    Args:
        rows, row_bytes: of address space; each row is rounded up to the granularity.
        ordinal: the GPU as this process numbers it.

    Raises:
        DriverError: the driver or the GPU cannot do it, or has no such addresses.
        OSError: no driver.
    """

    def __init__(self, rows: int, row_bytes: int, ordinal: int, driver: Driver | None = None) -> None:
        self.ordinal, self._driver = ordinal, driver or cuda_driver()
        device, supported, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        self._driver("cuDeviceGet", ctypes.addressof(device), ordinal)
        self._driver("cuDeviceGetAttribute", ctypes.addressof(supported), _SUPPORTED, device.value)
        if not supported.value:
            raise DriverError(f"GPU {ordinal} has no virtual memory management")
        location = MemLocation(_DEVICE, device.value)
        self._kind = AllocationProp(type=_PINNED, location=location)
        self._access = AccessDesc(location, _READ_WRITE)
        self._driver("cuMemGetAllocationGranularity", ctypes.addressof(size), ctypes.addressof(self._kind), _MINIMUM)
        row_bytes = rounded(row_bytes, size.value)
        nbytes, address = rows * row_bytes, ctypes.c_uint64()
        try:
            self._driver("cuMemAddressReserve", ctypes.addressof(address), nbytes, size.value, 0, 0)
        except MemoryError as error:  # of addresses, not of memory
            raise DriverError(f"reserving {nbytes} bytes of address space: {error}") from error
        super().__init__(address.value, rows, row_bytes, size.value)
        weakref.finalize(self, _give_up, self._driver, ordinal, address.value, nbytes, self.mapped).atexit = False

    def tensor(self) -> torch.Tensor:
        """See :meth:`AddressRange.tensor`. The beginning must be mapped: torch asks CUDA where the address belongs."""
        device = torch.device("cuda", self.ordinal)
        with torch.cuda.device(device):
            found = torch.as_tensor(_Exported(self), device=device)
        if found.data_ptr() != self.address or found.device != device:
            raise DriverError(f"torch made a copy on {found.device} instead of a view of addresses of {device}")
        return found

    def _map(self, piece: Piece) -> None:
        offset, size = piece
        place, handle = self.address + offset, ctypes.c_ulonglong()
        self._driver("cuMemCreate", ctypes.addressof(handle), size, ctypes.addressof(self._kind), 0)
        try:
            self._driver("cuMemMap", place, size, 0, handle.value, 0)
        finally:
            self._driver("cuMemRelease", handle.value)  # from here on the mapping keeps the memory
        try:
            self._driver("cuMemSetAccess", place, size, ctypes.addressof(self._access), 1)
        except BaseException:
            self._driver("cuMemUnmap", place, size)
            raise

    def _unmap(self, piece: Piece) -> None:
        offset, size = piece
        self._driver("cuMemUnmap", self.address + offset, size)

    def _changed(self, nbytes: int) -> None:
        device_memory.mapped_changes(self.ordinal, nbytes)


class _Exported:
    """What torch asks a stranger's array on a GPU; the tensor keeps it, and with it the range."""

    def __init__(self, owner: DeviceRange) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (owner.nbytes,), "typestr": "|u1", "data": (owner.address, False), "strides": None, "version": 3,
        }  # fmt: skip


def _give_up(driver: Driver, ordinal: int, address: int, nbytes: int, mapped: list[Piece]) -> None:
    """The end of a range that nothing refers to any more."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(ordinal)
        for offset, size in mapped:
            driver("cuMemUnmap", address + offset, size)
        driver("cuMemAddressFree", address, nbytes)
        device_memory.mapped_changes(ordinal, -sum(size for _, size in mapped))
    except (RuntimeError, MemoryError):  # the context is gone or broken, and its memory with it
        pass
