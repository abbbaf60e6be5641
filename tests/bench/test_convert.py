"""rl3d bench convert: every way is measured in a process of its own, and what came back is the same."""

import json

import pytest

from rl3d.bench import BenchError
from rl3d.bench.convert import LARGEST, once, synthetic_config
from rl3d.cli import main
from rl3d.models import Architecture, parameter_specs


def test_the_synthetic_model_has_the_size_asked_for() -> None:
    for gigabytes in (0.5, 2.0, 14.0):
        arch = Architecture.from_hf(synthetic_config(gigabytes))
        assert 2 * arch.num_parameters / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert 2 * max(s.numel for s in parameter_specs(arch, arch.vocab_size)) == LARGEST


def test_a_way_that_fails_is_one_error(tmp_path) -> None:
    with pytest.raises(BenchError, match="bench convert: copy failed"):
        once("copy", tmp_path / "nothing", tmp_path / "x")


@pytest.mark.slow
def test_there_and_back(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "convert", "--gigabytes", "0.35", "--dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["rows"]]
    assert found["same"] and "HF -> Megatron, 2 job(s)" in names and len(names) >= 7
    assert all(row["seconds"] > 0 for row in found["rows"])
    peaks = {row["name"]: row["peak_bytes"] for row in found["rows"]}
    assert peaks["HF -> Megatron, 1 job(s)"] <= 2 * LARGEST + 128e6
    assert not list(tmp_path.iterdir())
