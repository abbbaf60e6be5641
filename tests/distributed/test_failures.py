"""Ranks that something else has started: one fails, all end, one traceback."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl3d.distributed.environment import free_port
from tests.ranks import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def _environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RL3D_"))}
    return {**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Ended:
    codes: list[int]
    outputs: list[str]
    seconds: float

    @property
    def all_output(self) -> str:
        return "\n".join(self.outputs)


def _start(mode: str, count: int) -> Ended:
    """Start ranks by hand, as a batch system without any launcher of its own would; nobody kills the others."""
    env = {**_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.failing_rank", mode],
            cwd=ROOT,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Ended([process.returncode for process in processes], outputs, time.monotonic() - begin)


def test_an_exception_ends_every_rank_and_is_shown_once() -> None:
    ended = _start("raise", 3)
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < 150
    assert ended.all_output.count("Traceback (most recent call last)") == 1
    assert "ValueError: deliberate" in ended.outputs[1]
    for rank in (0, 2):
        assert f"rank 1 failed: ValueError: deliberate; stopping rank {rank}" in ended.outputs[rank]


def test_the_death_of_rank_zero_ends_the_others() -> None:
    ended = _start("rank0", 2)
    assert ended.codes == [-9, 1]
    assert ended.seconds < 150
    assert "rank 0 failed: its process" in ended.outputs[1]


def test_a_clean_end_under_torchrun_says_nothing_about_failures() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        + ["-m", "tests.distributed.failing_rank", "ok"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"rank {rank}/2 local {rank} nodes (0, 0) ok" for rank in range(2)]
    assert "failed" not in run.stderr


def test_run_ranks_brings_the_first_failing_traceback() -> None:
    with pytest.raises(RanksFailed) as error:
        run_ranks("tests.distributed.rank_checks:one_fails", 2, {"culprit": 1}, fresh=True)
    assert "ValueError: deliberate on rank 1" in str(error.value)
    assert str(error.value).count("Traceback (most recent call last)") == 1
