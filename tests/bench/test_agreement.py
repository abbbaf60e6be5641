"""What `rl3d bench agreement` says of generation in other batches, another order and on two ranks, and its arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl3d.bench.agreement import Way, compare, ways
from rl3d.cli import main
from tests.reference import hf_llama


def test_a_sequence_is_compared_up_to_its_first_other_token() -> None:
    right = [([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0]), ([1, 2], [-1.0, -1.0]), ([4], [-0.5])]
    found = [([5, 6, 9, 8], [-1.5, -2.0, -9.0, -9.0]), ([1, 2], [-1.0, -1.25]), ([4, 4], [-0.5, -7.0])]
    assert compare(right, right) == {"sequences": 0, "flips_per_thousand": 0.0, "tokens": 7, "logprob_mean": 0.0,
                                     "logprob_max": 0.0}  # fmt: skip
    # two tokens and the other one, two, one and the one too many
    assert compare(right, found) == {"sequences": 2, "flips_per_thousand": pytest.approx(2000 / 7), "tokens": 7,
                                     "logprob_mean": pytest.approx(0.75 / 5), "logprob_max": 0.5}  # fmt: skip


def test_one_thing_changes_at_a_time() -> None:
    assert ways([1, 2], [1, 8, 16], 16) == [Way(1, 16), Way(1, 16, True), Way(1, 1), Way(1, 8), Way(2, 16)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_in_fp32_nothing_differs_and_in_bf16_little(tmp_path, dtype: str) -> None:
    hf_llama(tied=True).save_pretrained(tmp_path / "model")
    words = ["bench", "agreement", str(tmp_path / "model"), "--prompts", "6", "--prompt-len", "9", "--new", "12", "--slots",
             "2", "--tp", "1,2", "--device", "cpu", "--dtype", dtype, "--json"]  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drawn"] == 72 and [(r["tp"], r["slots"], r["shuffled"]) for r in found["rows"]] == [
        (1, 6, True), (1, 2, False), (2, 6, False)]  # fmt: skip
    for row in found["rows"]:
        if dtype == "float32":
            assert row["sequences"] <= found["close"] and row["logprob_max"] < 1e-4
        assert row["logprob_max"] < 0.5 and row["tokens"] <= 72
    if dtype == "bfloat16":
        assert found["rows"][-1]["logprob_max"] > 0, "sums over two ranks round differently"


def test_numbers_that_make_no_sense_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agreement", "qwen2.5-0.5b", "--tp", "2,3"]) != 0
    assert "each must divide the largest" in capsys.readouterr().err
    assert main(["bench", "agreement", "qwen2.5-0.5b", "--slots", "0"]) != 0
