"""`if rank == 0: actor.switch_to_generation()` and its relatives, on three real ranks."""

from typing import Any

import pytest

from tests.distributed import control_checks
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks("tests.distributed.control_checks:main", nproc=3, timeout=200, fresh=True)


def test_call_on_rank_zero_and_barrier_on_all(results: dict[str, Any]) -> None:
    one = results["one_rank_only"]
    assert one["result"] == 3  # the handler's all-reduce had three ranks
    assert one["modes"] == ["generation"] * 3
    assert one["threads"] == [["MainThread"], ["rl3d-one"], ["rl3d-one"]]
    assert one["runs"] == [["generation", "training", "generation"]] * 3


def test_calls_on_all_ranks_run_on_their_main_threads(results: dict[str, Any]) -> None:
    every = results["all_ranks"]
    assert every["results"] == [3, 3, "training"]
    assert every["threads"] == [["MainThread"]] * 3
    assert every["overhead_ms"] < 200  # 1 to 2 ms on two busy cores


def test_a_late_call_takes_the_result_of_what_the_listener_ran(results: dict[str, Any]) -> None:
    late = results["late_rank_joins"]
    assert late["results"] == [[3, 3, 3]] * 3
    assert late["runs"] == [["generation", "training", "generation"]] * 3
    assert late["modes"] == ["generation"] * 3


def test_rounds_do_not_mix(results: dict[str, Any]) -> None:
    mixed = results["some_claim_some_do_not"]
    assert mixed["runs"] == [["generation", "training"] * 5] * 3
    assert mixed["modes"] == ["training"] * 3


def test_different_order_raises_on_every_rank(results: dict[str, Any]) -> None:
    order = results["different_order"]
    for error in order["errors"]:
        assert error.startswith("ControlError: ranks disagree on operation 0")
        assert "called generation" in error and "called training" in error and "rank 1" in error
    assert max(order["seconds"]) < 30, "an error at once, not the time-out"
    assert order["again"] == [None] * 3  # agreed again
    assert order["runs"] == [["training"]] * 3  # nothing ran before the disagreement was known


def test_different_order_raises_even_when_the_listener_followed(results: dict[str, Any]) -> None:
    errors = results["different_order_when_late"]["errors"]
    assert [[bool(error) for error in rank] for rank in errors] == [
        [False, False, True],  # ranks 0 and 2 hear of it at their next call
        [False, True, False],
        [False, False, True],
    ]
    assert "generation, called by rank 1, was not joined by rank(s) 0, 2" in errors[1][1]


def test_a_call_that_nobody_joins_times_out(results: dict[str, Any]) -> None:
    alone = results["nobody_joins"]
    assert "rollout, called by rank 0, was not joined by rank(s) 1, 2 within 1 s" in alone["errors"][0]
    assert "rollout, called by rank 0" in alone["follower"][1]
    assert alone["wall"] < 30


def test_a_failing_handler_raises_on_every_rank(results: dict[str, Any]) -> None:
    broken = results["handler_fails"]
    told = "ControlError: broken failed on rank 2: ValueError: no room for the arena"
    assert broken["at_once"] == told
    assert broken["next"] == [None, told, "ValueError: no room for the arena"]
    assert broken["recovered"] == 3


def test_one_rank_needs_no_store() -> None:
    assert control_checks.closed_channel_raises() == "generation: the channel is closed"
