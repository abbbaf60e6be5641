"""The bench of generation, on a model that no file holds, beside transformers' own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl3d.cli import main
from tests.reference import TINY

ROOT = Path(__file__).resolve().parents[2]


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    shape = {**TINY, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    (tmp_path / "tiny.json").write_text(json.dumps(shape))
    words = ["bench", "generate", str(tmp_path / "tiny.json"), "--device", "cpu", "--prompt", "5", *options, "--json"]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_sequences_that_end_at_random_and_wait_for_places(tmp_path):
    (row,) = measured(tmp_path, "--batch", "12", "--new", "40", "--ends", "10", "--slots", "4")["rows"]
    tokens = row["tokens_per_second"] * row["seconds"]
    assert 12 * 3 < tokens < 12 * 30, "tens of tokens each, not forty"
    assert row["batches"] > 3 and "decode_step_s" not in row


def test_what_transformers_cannot_do_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "qwen2.5-0.5b", "--engine", "hf", "--slots", "2"]) != 0
    assert "--ends and --slots are of the engine megatron" in capsys.readouterr().err


def test_tokens_per_second_of_both_engines(tmp_path):
    found = measured(tmp_path, "--batch", "1,3", "--new", "8", "--engine", "megatron,hf", "--top-p", "0.9")
    rows = {(row["engine"], row["batch"]): row for row in found["rows"]}
    assert rows.keys() == {("megatron", 1), ("megatron", 3), ("hf", 1), ("hf", 3)}
    for (engine, batch), row in rows.items():
        assert abs(row["tokens_per_second"] * row["seconds"] - 8 * batch) < 1e-6, "every sequence has its full length"
        assert 0 < row["first_token_s"] <= row["prefill_s"] < row["seconds"]
        if engine == "megatron":
            assert row["sampling_share"] > 0 and row["after_update"] > 0 and row["bandwidth_share"] is None
