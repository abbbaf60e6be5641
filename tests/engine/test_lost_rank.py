"""A rank is killed in the middle of a switch: the others raise, and name it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rl3d.distributed.environment import free_port
from tests.reference import save_llama

ROOT = Path(__file__).resolve().parents[2]


def test_a_rank_that_dies_half_way_is_named_by_all_others(tmp_path):
    directory, victim, count = save_llama(tmp_path / "model"), 1, 3
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
    for rank in (0, 2):
        found = re.search(rf"outcome of rank {rank} in (\w+) mode: (.*)", outputs[rank])
        assert found is not None, outputs[rank]
        assert found[1] == "training", "the old mode"
        assert found[2].startswith("ControlError: switch_to_generation broke off: rank(s) 1 no longer answer"), found[2]
    assert processes[victim].returncode == -9
