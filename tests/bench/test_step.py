"""A bench of whole steps on a model that no file holds."""

import json
import subprocess
import sys
from pathlib import Path

from tests.reference import TINY

ROOT = Path(__file__).resolve().parents[2]


def test_a_ppo_step_of_random_weights_is_timed_by_phase(tmp_path):
    shape = {**TINY, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    words = ["bench", "step", str(tmp_path / "tiny.json"), "--device", "cpu", "--algorithm", "ppo", "--prompts", "2"]
    words += ["--samples", "2", "--prompt-len", "9", "--response-len", "5", "--steps", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 2 * 2 * (9 + 5), "every response has its full length"
    phases = found["seconds"]
    assert {"sample", "switch", "reference", "values", "update critic", "update actor", "step"} <= phases.keys()
    assert 0 < phases["update critic"] < phases["step"] and 0 < phases["update actor"] < phases["step"]
