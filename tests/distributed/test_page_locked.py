"""Page-locked memory at its size, and what becomes of the user's own settings."""

import os
import subprocess
import sys

import pytest

ASK = """
import torch
from rl3d.distributed.page_locked import page_locked_bytes, take_exact_sizes
print(take_exact_sizes(), torch._C._accelerator_getAllocatorSettings())
print(page_locked_bytes(100 << 20), page_locked_bytes(3000))
"""


@pytest.mark.parametrize(
    "given,left",
    [
        ("", "pinned_max_round_threshold_mb:64"),
        ("expandable_segments:True", "expandable_segments:True,pinned_max_round_threshold_mb:64"),
        ("pinned_max_round_threshold_mb:16", "pinned_max_round_threshold_mb:16"),
    ],
)
def test_large_buffers_are_not_rounded_and_other_settings_stay(given: str, left: str) -> None:
    done = subprocess.run([sys.executable, "-c", ASK], env={**os.environ, "PYTORCH_ALLOC_CONF": given},
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    able, *rest = done.stdout.split()
    if able != "True":
        pytest.skip("this torch rounds page-locked buffers, whatever it is told")
    assert rest == [left, str(100 << 20), "4096"]
