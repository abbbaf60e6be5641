"""The bench of generation, on a model that no file holds, beside transformers' own."""

import json
import subprocess
import sys
from pathlib import Path

from tests.reference import TINY

ROOT = Path(__file__).resolve().parents[2]


def test_tokens_per_second_of_both_engines(tmp_path):
    shape = {**TINY, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    words = ["bench", "generate", str(tmp_path / "tiny.json"), "--device", "cpu", "--batch", "1,3", "--prompt", "5"]
    words += ["--new", "8", "--engine", "megatron,hf", "--top-p", "0.9", "--json"]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["engine"], row["batch"]): row for row in found["rows"]}
    assert rows.keys() == {("megatron", 1), ("megatron", 3), ("hf", 1), ("hf", 3)}
    for (engine, batch), row in rows.items():
        assert abs(row["tokens_per_second"] * row["seconds"] - 8 * batch) < 1e-6, "every sequence has its full length"
        assert 0 < row["first_token_s"] <= row["prefill_s"] < row["seconds"]
        if engine == "megatron":
            assert row["sampling_share"] > 0 and row["after_update"] > 0 and row["bandwidth_share"] is None
