"""A rank is killed in the middle of a switch: the others raise, and name it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rl3d.distributed.environment import free_port
from tests.reference import save_llama

ROOT = Path(__file__).resolve().parents[2]


def _outcomes(tmp_path: Path, victim: int, count: int) -> dict[int, str]:
    """Rank: what a switch came to there, in which ``victim`` was killed; one line by rank that lives."""
    directory = save_llama(tmp_path / "model")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RL3D_"))}
    env = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.dying_rank", str(directory), str(victim)], cwd=ROOT, text=True,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[victim].returncode == -9
    found = {rank: re.search(rf"outcome of rank {rank} (.*)", outputs[rank]) for rank in range(count) if rank != victim}
    assert all(found.values()), outputs
    return {rank: line[1] for rank, line in found.items() if line is not None}


def test_a_rank_that_dies_half_way_is_named_by_all_others(tmp_path):
    expected = "in training mode: ControlError: switch_to_generation broke off: rank(s) 1 no longer answer"
    outcomes = _outcomes(tmp_path, victim=1, count=3)
    assert {rank: line[: len(expected)] for rank, line in outcomes.items()} == {0: expected, 2: expected}


def test_the_others_say_so_when_the_rank_that_dies_keeps_the_store(tmp_path):
    expected = "in training mode: ControlError: switch_to_generation broke off: the job's store has gone"
    assert _outcomes(tmp_path, victim=0, count=2)[1][: len(expected)] == expected
