"""rl3d scale and the best pairs of rl3d plan: tables, one JSON object, CSV, a picture, reasons, mistakes."""

import csv
import json
import sys
from pathlib import Path

import pytest
import yaml

from rl3d.cli import main
from rl3d.config import LayoutConfig
from tests.cli.test_cli import probe


def test_the_best_pairs_and_a_snippet_that_the_configuration_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2.5-7b", "--gpus", "16"]) == 0
    out = capsys.readouterr().out
    assert "qwen2.5-7b on 16 GPUs (h100-8), predicted: the best of " in out
    reasons = [line for line in out.splitlines() if line[:3] in ("1. ", "2. ", "3. ", "4. ", "5. ")]
    assert len(reasons) == 5
    for line in reasons:
        assert "generate; " in line and " GB to spare" in line and "of the step" in line
    snippet = yaml.safe_load(out[out.index("\nlayout:\n") : out.index("\nMore about one")])
    layout = LayoutConfig(**snippet["layout"])
    assert layout.train_layout.resolve(16) and layout.gen_layout.replicas(16)
    assert main(out.split("rl3d ")[-1].split()) == 0  # "More about one" runs as printed


def test_the_best_pairs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2.5-1.5b", "--gpus", "8", "--gen", "tp2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["pairs"]) == 5 and found["fit"] >= 5
    assert {pair["gen"] for pair in found["pairs"]} == {"tp2"}
    seconds = [pair["step_seconds"] for pair in found["pairs"]]
    assert seconds == sorted(seconds)
    assert all(pair["switch"]["received"] == pair["switch"]["bounds"]["received"] for pair in found["pairs"])


def test_a_model_that_fits_nowhere_says_what_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama2-70b", "--gpus", "8", "--gpu-mem", "24"]) == 1
    out = capsys.readouterr().out
    assert "llama2-70b on 8 GPUs of 24 GB (h100-8): none of " in out
    assert " of 24.0 GB; most of it " in out or " GB; most of it " in out
    assert "try --offload optimizer" in out


def test_scale_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "out" / name for name in ("scale.csv", "scale.png")]
    words = ["scale", "qwen2.5-7b", "--gpus", "16,8", "--csv", str(files[0]), "--plot", str(files[1])]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.index("8 GPUs, 1 node: ") < out.index("16 GPUs, 2 nodes: ") < out.index("Scaling of the best pair")
    assert files[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 20e3 < files[1].stat().st_size < 150e3

    rows = list(csv.DictReader(files[0].open()))
    assert {row["gpus"] for row in rows} == {"8", "16"} and len(rows) > 60
    able = [row for row in rows if row["fits"] == "1"]
    lacking = [row for row in rows if row["fits"] == "0"]
    assert able and lacking
    for row in able:
        parts = sum(float(row[key]) for key in ("generation_s", "logprobs_s", "update_s", "switch_s", "host_s"))
        assert float(row["step_s"]) == pytest.approx(parts, rel=1e-4)
        assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(
            512 * 1536 / float(row["step_s"]) / int(row["gpus"]), rel=1e-4
        )
        assert row["reason"] == "" and int(row["kv_room_bytes"]) > 0
    for row in lacking:
        assert row["reason"] and row["step_s"] == ""
    assert [row["switch_from"] for row in rows[:6]] == ["plan"] * 5 + ["formula"]
    for row in able[:3]:
        update = [int(value) for name, value in row.items() if name.startswith("update: ") and value]
        assert sum(update) <= int(row["training_bytes"]) < 80e9
    assert "memory of the best, GB: " in out and "update " in out
    assert any("weights" in name for name in rows[0]) and any("update: " in name for name in rows[0])


def test_64_gpus_take_seconds_and_no_torch() -> None:
    _, heavy, seconds = probe("scale", "llama2-7b", "--gpus", "64")
    assert "torch" not in heavy
    assert seconds < 8  # under 3 on an idle core


@pytest.mark.parametrize(
    "words, message",
    [
        (["llama2-8b", "--gpus", "8"], "did you mean llama3-8b or llama2-7b"),
        (["llama2-7b", "--gpus", "12"], "12 GPUs do not fill nodes of 8; use a multiple of 8"),
        (["llama2-7b", "--gpus", "8", "--topology", "no.yaml"], "no such file or preset"),
    ],
)
def test_mistakes_are_one_clear_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and message in printed.err


@pytest.mark.parametrize("words", [["--gpus", "8,x"], ["--gpus", "0"], ["--gpus", "8", "--gpu-mem", "none"]])
def test_numbers_that_are_none_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["scale", "llama2-7b", *words])
    assert done.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python itself does for a module that cannot be imported
    monkeypatch.delitem(sys.modules, "rl3d.cli.scale_plot", raising=False)
    assert main(["scale", "llama2-7b", "--gpus", "8", "--plot", str(tmp_path / "x.png")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "pip install 'rl3d[plot]'" in printed.err
