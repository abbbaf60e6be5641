"""The bench of first batches, on two ranks: every figure is there and adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl3d.cli import main
from tests.reference import TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_first_and_later_batches_are_timed(tmp_path):
    shape = {**TINY, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    words = ["bench", "first_batch", str(tmp_path / "tiny.json"), "--device", "cpu", "--ranks", "2", "--train", "tp2.zero1"]
    words += ["--batch", "2", "--prompt-len", "9", "--response-len", "6", "--rounds", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == 2 and found["first"] > 0 < found["later"] and found["ratio"] > 0
    assert found["first_token_s"] > found["switch_s"] > 0


def test_no_rounds_are_refused(capsys):
    assert main(["bench", "first_batch", "qwen2.5-0.5b", "--rounds", "0"]) != 0
    assert "--rounds 0 --later 3; expected 1 or more" in capsys.readouterr().err
