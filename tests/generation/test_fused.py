"""The fused draw in Triton's interpreter; steps of the fused body are among the runs of test_megatron."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rl3d.generation.graphs import ROWS, column_bucket, row_bucket

ROOT = Path(__file__).resolve().parents[2]


def test_fused_draws_are_those_of_torch():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "tests.generation.fused_checks", "cpu"], env=env, cwd=ROOT, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    found = report["sampler"]
    assert found["draws"] == 3 * 6 * 12 and found["different"] == 0 and found["logprob"] < 1e-5
    found = report["filters"]
    assert found["draws"] == 4 * (24 + 6 + 4 + 4) and found["different"] == 0 and found["logprob"] < 1e-5
    assert found["edges"] < 1e-5, "the margin within which draws are said to be close"
    guessed, all_of_it = found["left"]
    assert guessed == 0 and all_of_it == 5, "without room rows are sought in all their logits"


def test_buckets_hold_what_they_are_asked_for():
    for rows in range(1, 600):
        bucket = row_bucket(rows)
        assert rows <= bucket <= max(2 * rows, 1) and (bucket in ROWS or bucket % 64 == 0)
    for page_size in (16, 48, 64):
        columns = -(-3000 // page_size)
        for tokens in (1, 255, 256, 257, 1000, 3000):
            found = column_bucket(tokens, page_size, columns)
            assert found <= columns and found * page_size >= tokens
    assert column_bucket(257, 32, 1000) == column_bucket(512, 32, 1000), "sequences grow without a new graph at each page"
