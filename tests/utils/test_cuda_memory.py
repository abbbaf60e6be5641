"""The calls of CUDA's driver: their structures against cuda.h, and their order against a stand-in that is as strict."""

import ctypes
import gc
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl3d.utils import cuda_memory, device_memory
from rl3d.utils.cuda_memory import AccessDesc, AllocationFlags, AllocationProp, DeviceRange, Driver, DriverError, MemLocation

HERE = Path(__file__).resolve().parent
GRANULE = 2 << 20


def header() -> Path | None:
    """Where a cuda.h is: the wheels of Triton and of NVIDIA have one."""
    for package, below in (
        ("triton", "backends/nvidia/include"),
        ("nvidia", "cu13/include"),
        ("nvidia", "cuda_runtime/include"),
    ):
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(root) / below / "cuda.h").exists():
                return Path(root) / below
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, as a library and as a program."""
    include, compiler = header(), shutil.which("gcc") or shutil.which("cc")
    if include is None or compiler is None:
        pytest.skip("no cuda.h or no C compiler here")
    out = tmp_path_factory.mktemp("driver") / "strict"
    common = [compiler, "-O1", "-Wall", "-Werror", f"-I{include}", str(HERE / "strict_driver.c")]
    subprocess.run([*common, "-shared", "-fPIC", "-o", f"{out}.so"], check=True)
    subprocess.run([*common, "-o", str(out)], check=True)
    return out


@pytest.fixture
def driver(built: Path) -> Iterator[Any]:
    driver = Driver(f"{built}.so")
    library = driver._library
    library.strict_used.restype = library.strict_reserved.restype = ctypes.c_size_t
    library.strict_limit.argtypes = [ctypes.c_size_t]
    yield driver
    library.strict_limit(ctypes.c_size_t(-1).value)
    gc.collect()
    assert library.strict_used() == library.strict_reserved() == device_memory.mapped_bytes(0) == 0, "nothing is left behind"


def test_structures_are_those_of_the_header(built: Path) -> None:
    lines = subprocess.run([built], check=True, text=True, capture_output=True).stdout.splitlines()
    found = {name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)}
    flags = AllocationProp.allocFlags.offset
    expected = {
        "CUmemLocation": ctypes.sizeof(MemLocation), "CUmemAllocationProp": ctypes.sizeof(AllocationProp),
        "CUmemAccessDesc": ctypes.sizeof(AccessDesc), "CUmemGenericAllocationHandle": ctypes.sizeof(ctypes.c_ulonglong),
        "CUdeviceptr": ctypes.sizeof(ctypes.c_uint64), "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_memory._PINNED,
        "CU_MEM_LOCATION_TYPE_DEVICE": cuda_memory._DEVICE, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_memory._READ_WRITE,
        "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_memory._MINIMUM, "CUDA_ERROR_OUT_OF_MEMORY": cuda_memory._OUT_OF_MEMORY,
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_memory._SUPPORTED,
    }  # fmt: skip
    for name, kind in (
        ("CUmemLocation", MemLocation),
        ("CUmemAllocationProp", AllocationProp),
        ("CUmemAccessDesc", AccessDesc),
    ):
        expected |= {f"{name}.{field[0]}": getattr(kind, field[0]).offset for field in kind._fields_}
    expected |= {
        f"CUmemAllocationProp.allocFlags.{field[0]}": flags + getattr(AllocationFlags, field[0]).offset
        for field in AllocationFlags._fields_
    }
    assert found == expected


def test_memory_comes_and_goes_under_one_address(driver: Any) -> None:
    used, rows = driver._library.strict_used, DeviceRange(3, 5 * GRANULE - 1, 0, driver)
    assert rows.row_bytes == 5 * GRANULE and rows.granularity == GRANULE and rows.address % GRANULE == 0
    assert used() == 0 and driver._library.strict_reserved() == 15 * GRANULE
    for _ in range(3):
        rows.map([(row * rows.row_bytes, 2 * GRANULE) for row in range(3)])
        ctypes.memset(rows.address, 7, 2 * GRANULE)
        rows.map([(row * rows.row_bytes + 2 * GRANULE, GRANULE) for row in range(3)])
        ctypes.memset(rows.address + 2 * rows.row_bytes, 8, 3 * GRANULE)
        assert ctypes.string_at(rows.address, 2 * GRANULE) == b"\7" * (2 * GRANULE), "growing leaves what is there"
        assert (
            used()
            == rows.mapped_bytes
            == device_memory.mapped_bytes(0)
            == device_memory.mapped_bytes("cuda:0")
            == 9 * GRANULE
        )
        assert rows.unmap() == 9 * GRANULE and used() == 0 == device_memory.mapped_bytes(0)
    rows.map([(0, GRANULE)])  # given up with memory under it: the fixture looks whether all of it is gone


def test_too_much_leaves_what_was_there(driver: Any) -> None:
    rows = DeviceRange(4, 4 * GRANULE, 0, driver)
    rows.map([(row * rows.row_bytes, GRANULE) for row in range(4)])
    ctypes.memset(rows.address, 9, GRANULE)
    driver._library.strict_limit(10 * GRANULE)  # 4 are there, 12 more are wanted
    with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        rows.map([(row * rows.row_bytes + GRANULE, 3 * GRANULE) for row in range(4)])
    assert driver._library.strict_used() == rows.mapped_bytes == device_memory.mapped_bytes(0) == 4 * GRANULE
    assert ctypes.string_at(rows.address, GRANULE) == b"\x09" * GRANULE
    rows.map([(row * rows.row_bytes + GRANULE, 3 * GRANULE) for row in range(2)])
    assert rows.mapped_bytes == 10 * GRANULE


def test_what_the_driver_refuses_is_said(driver: Any) -> None:
    rows = DeviceRange(1, GRANULE, 0, driver)
    with pytest.raises(DriverError, match="cuMemCreate: CUDA_ERROR_INVALID_VALUE"):
        rows.map([(0, 1000)])
    with pytest.raises(DriverError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        rows.map([(GRANULE, GRANULE)])
    assert driver._library.strict_used() == 0, "what could not be mapped is not kept"
    with pytest.raises(DriverError, match="GPU 1 has no virtual memory management"):
        DeviceRange(1, GRANULE, 1, driver)
    with pytest.raises(DriverError, match="cuDeviceGet: error 101"):
        DeviceRange(1, GRANULE, 2, driver)
    with pytest.raises(DriverError, match="address space: cuMemAddressReserve: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceRange(1 << 10, 1 << 50, 0, driver)
    with pytest.raises(OSError):
        Driver("libno-such-driver.so.1")
