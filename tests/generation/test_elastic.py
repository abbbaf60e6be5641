"""The cache whose address stays, on the CPU; ``python -m tests.generation.elastic_checks cuda`` is the same on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.generation import elastic_checks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    from rl3d.distributed import bootstrap

    torch.set_num_threads(1)
    runtime = bootstrap.init(timeout_s=60, device="cpu")
    yield runtime
    runtime.shutdown()


def test_memory_comes_and_goes_and_the_address_stays() -> None:
    held, given_back, again, gone = elastic_checks.pools(CPU)["held_and_given_back_mb"]
    for there, rest in ((held, given_back), (again, gone)):
        assert 395 < there - rest < 450, "400 MB, all of it written"


def test_steps_on_memory_that_came_back_are_the_same(runtime: Any) -> None:
    pages = {name: row["pages"] for name, row in elastic_checks.steps(CPU).items()}
    assert max(pages["adaptive"]) > max(pages["lightweight"]) > min(pages["lightweight"])


def test_too_little_memory_is_said_and_changes_nothing(runtime: Any) -> None:
    for said in elastic_checks.refused(CPU).values():
        assert "Cannot allocate memory" in said and "GB of cpu are free" in said and "lower rollout.max_sequences" in said


def test_times_are_those_of_the_pieces() -> None:
    (row,) = elastic_checks.seconds(CPU, [64])
    assert row["mb"] == 64 and row["provide"] > 0 and row["release"] > 0
