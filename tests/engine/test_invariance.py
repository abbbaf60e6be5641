"""One update, however it is cut: gradients and losses against transformers, norms, skipped steps."""

import math

import pytest
import torch
import transformers

from rl3d.algorithms.aggregation import MODES
from tests.ranks import run_ranks
from tests.reference import hf_llama, save_llama, sequences, train_reference

pytestmark = pytest.mark.slow  # five layouts x three aggregations x splits, and every skipped step: minutes on two cores

LAYOUTS = ["tp1.pp1.zero1", "tp2.pp1.zero0", "tp1.pp2.zero1", "tp2.pp2.zero1", "tp1.pp2.vpp2.zero1"]
SKIPPING = [
    ("tp2.pp2.zero1", "float32"), ("tp2.pp2.zero1", "bfloat16"), ("tp1.pp2.vpp2.zero1", "bfloat16"),
    ("tp2.pp1.zero0", "float32"), ("tp2.pp1.zero2", "float32"), ("tp1.pp1.zero2", "bfloat16"),
    ("tp1.pp1.zero3", "bfloat16"),
]  # fmt: skip
NORMS = [
    ("tp2.pp1.zero0", "float32"), ("tp2.pp1.zero1", "float32"), ("tp2.pp2.zero1", "bfloat16"),
    ("tp2.pp1.zero2", "float32"), ("tp2.pp1.zero3", "float32"),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("invariance")
    for tied in (False, True):
        save_llama(directory / ("tied" if tied else "untied"), tied)
    return directory


@pytest.fixture(scope="module")
def facts(root):
    arguments = {"directory": str(root), "layouts": LAYOUTS, "skipping": SKIPPING, "norms": NORMS}
    return run_ranks("tests.engine.invariance_checks:main", 4, arguments, timeout=300)


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of the same update by transformers and autograd: one sequence after the other, no packing."""
    return {mode: _expected(mode) for mode in MODES}


def _expected(mode):
    model = hf_llama(tied=True)
    terms = []
    for i, s in enumerate(sequences(0)):
        if i == 3:
            continue
        logp = torch.log_softmax(model(s.tokens[None]).logits[0, s.prompt - 1 : -1] / 0.7, -1)
        chosen = logp.gather(1, s.tokens[s.prompt :, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        terms.append(-((-1.0) ** i * (i + 1)) * (chosen - chosen.detach()).exp() - 0.01 * entropy)
    loss = {
        "token-mean": lambda: torch.cat(terms).mean(),
        "seq-mean-token-sum": lambda: sum(t.sum() for t in terms) / len(terms),
        "seq-mean-token-mean": lambda: sum(t.mean() for t in terms) / len(terms),
    }[mode]()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), torch.stack([g.norm() for g in gradients.values()]).norm().item(), gradients


def test_loss_and_norm_do_not_depend_on_the_split(facts, expected):
    assert len(facts["updates"]) == len(LAYOUTS) * len(MODES) * 3
    for fact in facts["updates"]:
        loss, norm, _ = expected[fact["mode"]]
        assert fact["loss"] == pytest.approx(loss, rel=1e-5), fact
        assert fact["norm"] == pytest.approx(norm, rel=1e-5), fact


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_autograd_for_every_split(root, facts, expected, layout):
    for mode in MODES:
        found = transformers.AutoModelForCausalLM.from_pretrained(
            root / "gradients" / f"{layout}-{mode}", dtype=torch.float32
        )
        found = dict(found.named_parameters())
        assert found.keys() == expected[mode][2].keys()
        for name, gradient in expected[mode][2].items():
            gap = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert gap < 1e-5, (mode, name, float(gap))
    others = [fact for fact in facts["updates"] if fact["layout"] == layout]
    assert max(fact["gap"] for fact in others) < 1e-5, "micro-batch size or order of samples changed a gradient"


def test_the_ratio_is_one_before_the_first_update_for_any_micro_batch(facts):
    assert max(fact["log_ratio"] for fact in facts["updates"]) < 1e-4


def test_shares_of_tokens_are_reported_and_balanced(facts):
    tokens = [len(s.tokens) for s in sequences(0)]
    fact = next(f for f in facts["updates"] if f["layout"] == "tp1.pp1.zero1")
    assert fact["plain"] == max(sum(tokens[i : i + 2]) for i in range(0, 8, 2))
    assert fact["balanced"] < fact["plain"]


@pytest.mark.parametrize("case", SKIPPING, ids="-".join)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(root, facts, case):
    """One bad tensor on one rank: no rank steps, nothing changes, and training goes on as if it had not been."""
    fact = next(f for f in facts["skipped"] if f["name"] == "-".join(case))
    assert fact["stepped"] == 0 and fact["changed"] == 0 and fact["finite"] == 0
    assert fact["later"] == [True] * 3
    expected, norms = train_reference(tied=True)
    found = transformers.AutoModelForCausalLM.from_pretrained(root / "after" / fact["name"], dtype=torch.float32)
    found = found.state_dict()
    if case[1] == "float32":
        assert fact["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in expected.items():
            assert (found[name] - value).abs().max() / value.abs().max() < 1e-5, name
    else:
        assert fact["norms"] == pytest.approx(norms, rel=2e-2)
        flat, got = (torch.cat([v[name].flatten() for name in expected]) for v in (expected, found))
        assert (got - flat).norm() / flat.norm() < 1e-2


@pytest.mark.parametrize("case", NORMS, ids="-".join)
def test_the_norm_counts_shards_and_replicas_once(facts, case):
    # rank 0 alone would give 5.0, the replicated weight counted on both ranks 7.071
    assert facts["norms"]["-".join(case)] == pytest.approx(math.sqrt(9 + 9 + 16), rel=1e-6)


def test_tied_gradients_are_added_over_stages_before_the_mean_over_replicas(facts):
    # reduced over replicas too early: 7.0 on one stage and 9.5 on the other
    assert facts["tied"]["mean"] == pytest.approx((1 + 2) / 2 + (4 + 8) / 2, rel=1e-6)
    assert facts["tied"]["apart"] == 0.0


def test_logits_are_divided_by_the_temperature_in_training_too(facts):
    assert facts["temperature"] == pytest.approx([-0.2601, -0.4076], abs=5e-5)


def test_the_learning_rates_clock_stands_still_when_a_step_is_skipped(facts):
    clock = facts["clock"]
    assert clock["counts"] == [0, 0, 1, 2], "the second mini-batch gets the learning rate that the first did not use"
    assert clock["skipped"] == 1


def test_an_update_without_a_valid_sample_is_finite_and_changes_nothing(facts):
    metrics = facts["nothing_valid"]
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["moved"] == 0 and metrics["actor/total_loss"] == 0 and metrics["actor/grad_norm"] == 0
