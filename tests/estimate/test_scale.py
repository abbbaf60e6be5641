"""Pairs of layouts: all of them, judged with reasons, in order."""

from itertools import product

import pytest

from rl3d.estimate.fit import Fit
from rl3d.estimate.scale import candidates, layouts, scaling, switch_formula
from rl3d.estimate.step import Workload
from rl3d.estimate.topology import Topology, TopologyError
from rl3d.layout import GenLayout, LayoutError, TrainLayout
from rl3d.models import Architecture
from rl3d.models.shapes import shape

H100 = Topology.read("h100-8")
SMALL, LLAMA = (Architecture.from_hf(shape(name)) for name in ("qwen2.5-0.5b", "llama2-7b"))
WORK = Workload(sequences=512)


def _roomy(train: TrainLayout, gen: GenLayout, gpus: int) -> Fit:
    return Fit({"training": {"weights": 10}, "generation": {"weights": 10}}, 100 * 10**9, 90 * 10**9)


def test_all_pairs_and_no_other() -> None:
    """Qwen2.5-0.5B: 14 heads, 2 KV heads, ffn 4864, 24 layers. Every size of every axis, tried one by one."""
    found = set(layouts(SMALL, 8, H100))
    expected = set()
    for tp, pp, dp, zero, slot in product(range(1, 9), range(1, 9), range(1, 9), (1, 2, 3), range(1, 9)):
        fits = tp * pp * dp == 8 and 8 % slot == 0
        cut = all(14 % n == 0 and 2 % n == 0 and 4864 % n == 0 for n in (tp, slot))
        if fits and cut and (zero == 1 or (pp == 1 and dp > 1)):
            expected.add((TrainLayout(tp, pp, dp, zero), GenLayout(slot)))
    assert found == expected


def test_tensor_parallelism_stays_in_a_node() -> None:
    found = list(layouts(LLAMA, 64, H100))
    assert {train.tp for train, _ in found} == {gen.tp for _, gen in found} == {1, 2, 4, 8}
    assert {train.pp for train, _ in found} == {1, 2, 4, 8, 16, 32}  # 32 layers


def test_the_fastest_pair_is_first_and_planned() -> None:
    found = candidates(LLAMA, 16, H100, WORK, _roomy)
    able = [c for c in found if c.step]
    assert len(found) == len(list(layouts(LLAMA, 16, H100)))
    assert len(able) == len(found)
    totals = [c.step.total for c in able if c.step]
    assert totals[5:] == sorted(totals[5:]) and totals[:5] == sorted(totals[:5])
    assert [c.move is not None for c in found] == [True] * 5 + [False] * (len(found) - 5)
    for c in found[:5]:
        assert c.move and c.step and c.step.switch == c.move.time.seconds
        assert c.tokens_per_second(WORK) == pytest.approx(512 * 1024 / c.step.total / 16)


def test_one_side_can_be_fixed() -> None:
    found = candidates(LLAMA, 16, H100, WORK, _roomy, train=TrainLayout.parse("tp2.pp2"), planned=0)
    assert {str(c.train) for c in found} == {"tp2.pp2.dp4.zero1"} and len(found) == 4
    found = candidates(LLAMA, 16, H100, WORK, _roomy, gen=GenLayout(2), planned=0)
    assert {str(c.gen) for c in found} == {"tp2"} and len(found) > 10


def test_what_does_not_fit_says_why() -> None:
    def memory(train: TrainLayout, gen: GenLayout, gpus: int) -> Fit:
        training = {"weights": 30 * 10**9, "Adam moments": 120 * 10**9 // train.model_parallel}
        generation = {"weights": 60 * 10**9 // gen.tp}
        return Fit({"training": training, "generation": generation}, 70 * 10**9, 70 * 10**9 - 60 * 10**9 // gen.tp)

    found = candidates(LLAMA, 8, H100, Workload(512, 512, 520), memory)
    reasons = {(str(c.train), c.gen.tp): c.reason for c in found}
    text = "training needs 150.0 of 70.0 GB; most of it Adam moments"
    assert reasons["tp1.pp1.dp8.zero1", 8] == text
    assert reasons["tp2.pp2.dp2.zero1", 8] == ""
    assert [bool(c.reason) for c in found] == sorted(bool(c.reason) for c in found)
    lacking = [max(c.fit.peaks.values()) for c in found if c.reason and c.fit]
    assert lacking == sorted(lacking)  # what nearly fits comes before what does not by far

    found = candidates(LLAMA, 8, H100, Workload(512, 512, 514), memory)
    reasons = {(str(c.train), c.gen.tp): c.reason for c in found}
    assert reasons["tp2.pp1.dp4.zero1", 8] == "514 sequences do not divide by dp = 4"
    found = candidates(LLAMA, 8, H100, WORK, lambda *_: Fit({"training": {}, "generation": {}}, 10**9, 10**8))
    assert "0.10 GB are left for the KV cache; one sequence needs 0.54" in {c.reason for c in found}


@pytest.mark.parametrize(
    "train, gen, gpus",
    [("tp2.pp2", "tp4", 8), ("tp4.pp2", "tp2", 8), ("tp1.pp1.zero3", "tp4", 8), ("tp4.pp4", "tp8", 64), ("tp8", "tp4", 64)],
)
def test_the_formula_is_near_the_plan(train: str, gen: str, gpus: int) -> None:
    parsed, slot = TrainLayout.parse(train).resolve(gpus), GenLayout.parse(gen)
    exact = candidates(LLAMA, gpus, H100, WORK, _roomy, train=parsed, gen=slot, planned=1)[0]
    assert exact.move
    assert switch_formula(LLAMA, parsed, slot, gpus, H100) == pytest.approx(exact.move.time.seconds, rel=0.5)


def test_gpus_must_fill_nodes() -> None:
    with pytest.raises(TopologyError, match="12 GPUs do not fill nodes of 8"):
        candidates(LLAMA, 12, H100, WORK, _roomy)
    with pytest.raises(LayoutError, match="16 ranks do not divide by tp x pp = 6"):
        candidates(LLAMA, 16, H100, WORK, _roomy, train=TrainLayout(2, 3))


def test_scaling_is_against_the_smallest() -> None:
    works = [WORK, WORK]
    best = [candidates(LLAMA, gpus, H100, WORK, _roomy, planned=0)[0] for gpus in (8, 16)]
    rows = scaling(best, works)
    assert rows[0]["speedup"] == rows[0]["efficiency"] == 1.0
    assert best[0].step and best[1].step
    assert rows[1]["speedup"] == pytest.approx(best[0].step.total / best[1].step.total)
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["speedup"] / 2)
    assert 1.2 < rows[1]["speedup"] < 2.1
