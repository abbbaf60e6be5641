"""Four real ranks over gloo, one launch."""

from inspect import signature

import pytest
import torch
from torch.multiprocessing import reductions

from rl3d.reshard.transports.memory import for_process
from rl3d.reshard.transports.peer import _remedy
from tests.ranks import run_ranks
from tests.reshard.rank_checks import HOSTS, STAGING

MOVES = ["tp2.pp2->tp4 tied", "tp2.pp1.dp2->tp1x4", "tp2.pp2->tp1 on two ranks"]


@pytest.fixture(scope="module")
def result():
    return run_ranks("tests.reshard.rank_checks:main", nproc=4, timeout=150)


@pytest.mark.parametrize("move", [*MOVES, *(f"{move}, {hosts}" for move in MOVES for hosts in HOSTS)])
def test_round_trips_are_bit_exact_and_fingerprints_equal(result, move):
    found = result[move]
    for key in ("equal", "fingerprints_agree", "addresses_kept", "received_as_planned", "replicas"):
        assert found[key] == [True] * 4, key
    assert max(found["staging"]) <= STAGING
    assert min(found["buckets"]) > 1 and max(found["messages"]) > 0


def test_peers_memory_is_read_inside_a_host_and_messages_cross_hosts(result):
    for move in MOVES:
        assert result[f"{move}, one host"]["staging"] == [0] * 4
    assert max(result[f"{MOVES[2]}, two hosts"]["staging"]) > 0  # the others move nothing across


def test_memory_that_moved_is_mapped_again(result):
    assert result["peers"]["moved"] == [5.0] * 4


def test_a_copy_that_fails_on_one_rank_fails_on_all_and_can_be_repeated(result):
    assert all("rank 2" in line and "size of tensor" in line for line in result["peers"]["died"])
    assert result["peers"]["recovered"] == ["no error"] * 4


def test_ranks_that_cannot_map_memory_exchange_messages_and_say_so_once(result):
    found = result["peers"]
    assert found["right"] == [True] * 4
    assert found["names"] == ["peer+collective"] * 4 and max(found["staging"]) > 0
    assert [len(lines) for lines in found["lines"]] == [1, 0, 0, 0]
    assert "rank 1 cannot map memory of rank 0: not permitted here (3 such failures" in found["lines"][0][0]
    assert "one container" in found["lines"][0][0]
    assert all("rank 1 cannot map memory" in line for line in found["required"])


def test_the_link_to_a_peer_is_measured_once_and_only_when_asked(result):
    for (near, unmeasured), *far, apart in result["peers"]["links"]:
        assert apart == ["peer+collective", "memory"]
        assert (near, unmeasured) == ("memory", None)
        assert [way for way, _ in far] == ["peer"] * 3
        before, first, later = (rate for _, rate in far)
        assert before is None and first == later and 0.01 < first < 10_000


def test_one_rank_without_room_to_share_sends_messages_and_the_others_are_read(result):
    found = result["peers"]["full"]
    assert found["right"] == [True] * 4 and found["name"] == ["peer+collective"] * 4
    assert found["maps"] == [[0, 1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 3]], "nobody reads rank 2"
    assert max(found["staging"]) > 0 == min(found["staging"])
    (line,), *others = found["lines"]
    assert others == [[]] * 3 and line.startswith("rank 2 cannot share its weights: unable to allocate shared memory")
    assert "make /dev/shm larger" in line and "--shm-size" in line and line.endswith("exchange messages instead")
    assert all("make /dev/shm larger" in text for text in found["refused"])


def test_memory_of_a_gpu_that_this_process_does_not_see_is_refused_by_uuid():
    names = list(signature(reductions.rebuild_cuda_tensor).parameters)
    arguments = tuple(names)
    moved = for_process(arguments, "GPU-b", ["GPU-a", "GPU-b"], 0)
    assert dict(zip(names, moved)) == dict(zip(names, names)) | {"storage_device": 0}, "the reader's context maps it"
    with pytest.raises(OSError, match="sees 1 GPU.*on another one"):
        for_process(arguments, "GPU-b", ["GPU-a"], 0)


def test_the_remedy_fits_the_failure():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    hidden = "rank 1 cannot map memory of rank 0: this process sees 1 GPU(s), and that memory is on another one"
    assert "CUDA_VISIBLE_DEVICES" in _remedy([hidden], cuda) and "--gpus-per-task" in _remedy([hidden], cuda)
    assert "--ipc=host" in _remedy(["rank 1 cannot map memory of rank 0: invalid argument"], cuda)
    assert "one user in one container" in _remedy(["Permission denied"], cpu)


def test_a_mistake_on_one_rank_is_an_error_on_all(result):
    errors = result["errors"]
    for line in errors["shape"]:
        assert "rank 2, source layout tp2.pp1.dp2.zero1" in line and "linear_fc2" in line
        assert "expected shape (8, 4), found (5, 4)" in line
    assert all("ranks have different plans" in line for line in errors["plans"])
    assert all("rank 1" in line and "released" in line for line in errors["released"])
    assert errors["untouched"] and errors["recovered"]


def test_a_replica_that_drifted_is_named(result):
    assert result["replicas"]["clean"] == []
    (line,) = result["replicas"]["differs"]
    assert "linear_qkv.weight" in line and "ranks (0, 2)" in line


def test_groups_of_some_ranks(result):
    assert result["subgroup"]
