"""rl3d plan as people meet it: the report, one JSON object, the picture, and each mistake as one clear error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl3d.cli import main
from rl3d.estimate.topology import PRESETS
from tests.cli.test_cli import ROOT, probe

TINY = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 1000, "rope_theta": 1e4}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def test_json_is_one_object_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama2-7b", "--train", "tp2.pp2.dp2.zero1", "--gen", "tp4", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)  # and nothing else
    assert printed.err == ""
    for key in ("received", "sent"):
        assert set(found[key]) == {"mean", "max"}
        assert all(type(value) is int for value in found[key].values())
    # 13.48 GB: every rank holds a quarter of what it needs of its quarter of the model in its two stages' worth
    assert found["received"]["max"] == pytest.approx(1.685e9, rel=1e-3)
    assert found["received"]["max"] == pytest.approx(found["sent"]["max"], rel=1e-3)
    assert found["ratios"]["received"] == 1.0
    assert found["ratios"]["sent"] == pytest.approx(1, abs=1e-3)
    assert found["bounds"]["received"] == found["received"]
    assert 0 < found["staging"]["peak"] <= found["staging"]["cap"]
    assert 1e-3 < found["seconds"] < 0.35
    assert found["plan_seconds"] > 0 and len(found["hash"]) == 64
    assert type(found["aliased"]) is int


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama2-7b", "--train", "tp2.pp2.dp2.zero1", "--gen", "tp4"]) == 0
    out = capsys.readouterr().out
    assert "llama2-7b, 6.74B parameters, 8 GPUs on 1 node (h100-8): tp2.pp2.dp2.zero1 -> tp4, 2 copies" in out
    assert "predicted switch " in out and " ms" in out


def test_the_picture_is_what_ranks_hold(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    """TP2·PP2 -> TP4 on four ranks: a stage is a line, a quarter of the columns two characters."""
    assert main(["plan", tiny, "--train", "tp2.pp2.zero1", "--gen", "tp4", "--gpus", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("rank 0"))
    assert lines[at].split() == "rank 0 rank 1 rank 2 rank 3".split()
    # each rank keeps the slot that its half of a stage contains, and receives the same slot of the other stage
    assert lines[at + 1].split() == ["██░░····", "··▒▒····", "····██░░", "······▒▒"]
    assert lines[at + 2].split() == ["▒▒······", "░░██····", "····▒▒··", "····░░██"]


def test_a_mixture_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Mixtral, 93.4 GB, TP2·PP2·DP2 -> TP4: of its quarter a rank has the half that its stage holds."""
    words = ["plan", "mixtral-8x7b", "--gpus", "8"]
    assert main([*words, "--train", "tp2.pp2.zero1", "--gen", "tp4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["received"]["mean"] == pytest.approx(46_702_792_704 * 2 / 4 / 2, rel=0.01)
    assert found["received"] == found["bounds"]["received"]
    assert main(words) == 2  # the best pairs would be trained
    assert "model_type 'mixtral' is not supported" in capsys.readouterr().err


def test_ranks_that_hold_the_same_share_a_block(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert main(["plan", tiny, "--train", "tp1.dp8.zero1", "--gen", "tp1"]) == 0
    assert "\nrank 0-7\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["lama2-7b", "--gpus", "8"], "did you mean llama2-7b"),
        (["TINY", "--train", "tp3.dp1", "--gen", "tp1"], "8 query heads do not divide by tp=3; choose tp 1 or 2 or 4 or 8"),
        (["TINY", "--train", "tp1.dp3", "--gen", "tp3"], "8 query heads do not divide by tp=3"),
        (["TINY", "--train", "pp8.dp1", "--gen", "tp1"], "pp"),
        (["TINY", "--train", "tp2.dp3", "--gen", "tp1", "--gpus", "8"], "needs tp x pp x dp = 6 ranks, but there are 8"),
        (["TINY", "--train", "tp4", "--gen", "tp1", "--gpus", "6"], "6 ranks do not divide by tp x pp = 4"),
        (["TINY", "--train", "tp2.dp3", "--gen", "tp4"], "6 ranks do not divide by tp = 4"),
        (["TINY", "--train", "tp2", "--gen", "tp4"], "write for example tp2.pp1.dp1.zero1, or add --gpus N"),
        (["TINY", "--gen", "tp4"], "the number of GPUs is not known; add --gpus N"),
        (["TINY", "--train", "tp2x", "--gen", "tp4"], "cannot read 'tp2x'"),
        (["TINY", "--train", "tp2.dp6", "--gen", "tp2"], "12 GPUs do not fill nodes of 8"),
        (["TINY", "--train", "dp8", "--gen", "tp2", "--gpus-per-node", "3"], "8 GPUs do not fill nodes of 3"),
        (["TINY", "--gpus", "8", "--topology", "h10-8"], "no such file or preset; did you mean h100-8"),
    ],
)
def test_mistakes_are_one_clear_error(words: list[str], message: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(tiny if word == "TINY" else word for word in words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and message in printed.err and "Traceback" not in printed.err


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path) -> None:
    kept = tmp_path / "models--org--small"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(TINY))
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    for name, code in (("org/small", 0), ("org/other", 2)):
        words = [sys.executable, "-m", "rl3d", "plan", name, "--train", "tp2.dp2", "--gen", "tp1", "--json"]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert json.loads(done.stdout)["model"] == "small" if code == 0 else "hf download org/other" in done.stderr


def test_planning_needs_no_torch() -> None:
    _, heavy, seconds = probe("plan", "llama2-7b", "--train", "tp2.pp2.dp2.zero1", "--gen", "tp4", "--json")
    assert heavy == "['numpy', 'pydantic']"
    assert seconds < 2.0  # half a second on an idle core


def test_help_names_every_preset() -> None:
    output, _, _ = probe("plan", "--help")
    assert [name for name in PRESETS if name not in " ".join(output.split())] == []
