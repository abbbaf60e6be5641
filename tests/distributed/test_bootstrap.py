"""Ranks meeting at the store: every way it can go wrong names the rank, the value and the fix. No ranks are started."""

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rl3d.distributed import bootstrap
from rl3d.distributed.environment import Place, StartupError, free_port


def _place(rank: int, world_size: int, port: int = 1) -> Place:
    return Place(rank, world_size, rank, world_size, 0, "127.0.0.1", port, "env")


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_ranks_that_do_not_arrive_are_named(store: Any) -> None:
    store.set("boot/card/2", "{}")
    with pytest.raises(StartupError, match=r"2 of 4 ranks did not arrive within 0 s: rank\(s\) 1, 3"):
        bootstrap._meet(store, _place(0, 4), 0.2, "")


def test_world_sizes_that_differ_raise_on_both_sides(store: Any) -> None:
    store.set("boot/world_size", "2")  # rank 0 was started with 2
    with pytest.raises(StartupError, match="WORLD_SIZE=4 on rank 3, but WORLD_SIZE=2 on rank 0"):
        bootstrap._meet(store, _place(3, 4), 5, "")
    with pytest.raises(StartupError, match="WORLD_SIZE=4 on rank 3, but WORLD_SIZE=2 on rank 0"):
        bootstrap._meet(store, _place(0, 2), 5, "")


def test_two_processes_of_one_rank(store: Any) -> None:
    store.add("boot/count/1", 1)
    with pytest.raises(StartupError, match="two processes claim RANK=1 of WORLD_SIZE=2"):
        bootstrap._meet(store, _place(1, 2), 5, "")


def test_a_port_in_use_is_named() -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: the port is in use.*Set MASTER_PORT"):
            bootstrap._connect(_place(0, 2, port), timedelta(seconds=2))


def test_rank_zero_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(StartupError, match=f"rank 1 did not reach rank 0 at 127.0.0.1:{port} within 1 s"):
        bootstrap._connect(_place(1, 2, port), timedelta(seconds=1))


def test_nodes_are_numbered_by_their_first_rank() -> None:
    cards = [{"host": host} for host in ("b", "b", "a", "a", "a")]
    assert bootstrap._number_nodes(cards, _place(3, 5)) == ((0, 0, 1, 1, 1), 3)


def test_ranks_share_a_gpu_only_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"host": "a", "gpu": "GPU-1"}, {"host": "a", "gpu": "GPU-1"}, {"host": "b", "gpu": "GPU-1"}]
    monkeypatch.delenv("RL3D_SHARE_GPU", raising=False)
    with pytest.raises(StartupError, match="ranks 0, 1 would share one GPU.*RL3D_SHARE_GPU=1"):
        bootstrap._check_sharing(cards)
    assert not bootstrap._check_sharing(cards[1:])
    monkeypatch.setenv("RL3D_SHARE_GPU", "1")
    assert bootstrap._check_sharing(cards)


def test_unknown_device() -> None:
    with pytest.raises(StartupError, match="device='tpu': expected 'auto', 'cpu' or 'cuda'"):
        bootstrap._wants_cuda("tpu")
