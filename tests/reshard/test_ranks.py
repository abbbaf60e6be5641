"""Four real ranks over gloo, one launch."""

import pytest

from tests.ranks import run_ranks
from tests.reshard.rank_checks import STAGING

MOVES = ["tp2.pp2->tp4 tied", "tp2.pp1.dp2->tp1x4", "tp2.pp2->tp1 on two ranks"]


@pytest.fixture(scope="module")
def result():
    return run_ranks("tests.reshard.rank_checks:main", nproc=4, timeout=150)


@pytest.mark.parametrize("move", MOVES)
def test_round_trips_are_bit_exact_and_fingerprints_equal(result, move):
    found = result[move]
    for key in ("equal", "fingerprints_agree", "addresses_kept", "received_as_planned", "replicas"):
        assert found[key] == [True] * 4, key
    assert max(found["staging"]) <= STAGING
    assert min(found["buckets"]) > 1 and max(found["messages"]) > 0


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
