"""Attention over pages against plain attention: torch's path here, the kernel in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.generation.paged_checks import main


def test_torch_path() -> None:
    found = main("cpu")
    assert not found["triton"] and max(found["errors"].values()) < 2e-6  # type: ignore[attr-defined]


def test_kernel_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.generation.paged_checks"], env=env, cwd=root, text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"] and max(found["errors"].values()) < 2e-6
