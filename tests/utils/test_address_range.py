"""Host memory under fixed addresses, against what the kernel says of this process."""

import gc
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from rl3d.utils.address_range import HostRange
from tests.utils.limits import data_limited

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def mapped_at(address: int) -> str | None:
    """The permissions that the kernel has for an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        first, last = (int(x, 16) for x in place.split("-"))
        if first <= address < last:
            return permissions
    return None


def test_memory_comes_and_goes_and_the_address_stays():
    rows = HostRange(3, 1 << 40)  # three terabytes of addresses
    assert rows.granularity == PAGESIZE and mapped_at(rows.address) == "---p"
    pieces = [(row << 40, 32 * MB) for row in range(3)]
    start, places = resident(), set()
    whole = None
    for turn in range(3):
        rows.map(pieces)
        places.add(rows.tensor().data_ptr())
        whole = rows.tensor().view(3, 1 << 40) if whole is None else whole  # a tensor of before sees what is there now
        assert rows.mapped_bytes == 96 * MB
        assert not whole[:, : 32 * MB].any(), "fresh memory is zeros"
        whole[:, : 32 * MB] = turn + 1
        assert resident() - start > 90 * MB
        assert rows.unmap() == 96 * MB and rows.mapped_bytes == 0 == rows.unmap()
        assert resident() - start < 8 * MB and mapped_at(rows.address) == "---p"
    assert places == {rows.address}


def test_a_row_grows_and_keeps_what_it_has():
    rows = HostRange(2, 10 * PAGESIZE - 100)
    assert rows.row_bytes == 10 * PAGESIZE and rows.nbytes == 20 * PAGESIZE
    whole = rows.tensor().view(2, -1)
    rows.map([(0, PAGESIZE), (rows.row_bytes, PAGESIZE)])
    whole[:, :PAGESIZE] = 5
    rows.map([(PAGESIZE, 2 * PAGESIZE), (rows.row_bytes + PAGESIZE, 2 * PAGESIZE)])
    assert whole[:, : 3 * PAGESIZE].sum(dtype=torch.int64) == 2 * 5 * PAGESIZE and rows.mapped_bytes == 6 * PAGESIZE
    assert mapped_at(rows.address + 3 * PAGESIZE - 1) == "rw-p" and mapped_at(rows.address + 3 * PAGESIZE) == "---p"


def test_addresses_go_with_the_last_tensor():
    rows = HostRange(1, MB)
    rows.map([(0, MB)])
    address, part = rows.address, rows.tensor()[100:200].view(2, 50)
    del rows
    gc.collect()
    part += 3
    assert part.sum() == 300 and mapped_at(address) == "rw-p"
    del part
    gc.collect()
    assert mapped_at(address) is None


def test_too_much_leaves_what_was_there():
    row, rows = 16 * MB, HostRange(4, 16 * MB)
    first = [(i * row, PAGESIZE) for i in range(4)]
    rows.map(first)
    whole = rows.tensor().view(4, row)
    whole[:, :PAGESIZE] = torch.arange(1, 5, dtype=torch.uint8)[:, None]
    rest = [(i * row + PAGESIZE, row - PAGESIZE) for i in range(4)]
    with data_limited(2 * row + row // 2):  # enough for two and a half of four
        with pytest.raises(MemoryError, match="Cannot allocate memory"):
            rows.map(rest)
        assert rows.mapped == first and whole[:, :PAGESIZE].float().mean(1).tolist() == [1, 2, 3, 4]
        assert [mapped_at(rows.address + offset) for offset, _ in rest] == ["---p"] * 4
        rows.map(rest[:2])  # what was undone is free again
    whole[:2] = 7
    assert rows.mapped_bytes == 2 * row + 2 * PAGESIZE and whole[:2].sum(dtype=torch.int64) == 7 * 2 * row


def test_addresses_that_there_are_not_are_refused():
    with pytest.raises(OSError, match="reserving .* of address space"):
        HostRange(1 << 10, 1 << 50)
