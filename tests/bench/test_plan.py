"""rl3d bench plan: the known optima are met, in processes of their own."""

import json

import pytest

from rl3d.bench import BenchError
from rl3d.bench.plan import OPTIMA, Case, once
from rl3d.cli import main


def test_known_optima_of_eight_ranks_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["optima"]
    cases = [case for case in OPTIMA if case.gpus == 8]
    assert len(found) == len(cases) == 4
    for case, fact in zip(cases, found, strict=True):
        assert fact["received"]["mean"] / 1e9 == pytest.approx(case.mean, abs=1e-3)
        assert fact["received"]["max"] / 1e9 == pytest.approx(case.most, abs=1e-3)
        assert fact["received"] == fact["bounds"]["received"]
        assert fact["peak_bytes"] < 200e6


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "| llama2-7b | dp8.zero3 | tp8 | 8 | 1.065 | 1.155 | 1.065 | 1.155 | 1.155 |" in out


def test_a_case_that_cannot_be_is_one_error() -> None:
    with pytest.raises(BenchError, match="llama2-7b dp3.zero1 tp2 3 8 failed"):
        once(Case("llama2-7b", "dp3.zero1", "tp2", 3), 8)
