"""The critic against one process of Hugging Face and torch, in every layout."""

import pytest
import torch
import transformers

from tests.engine.critic_checks import SETTINGS, TEMPERATURE, samples
from tests.engine.critic_reference import train, values_of
from tests.ranks import run_ranks
from tests.reference import TINY, hf_llama, response_logprobs, save_llama

LAYOUTS = [
    "tp2.pp2.zero1", "tp1.pp1.zero1", "tp2.pp1.zero1", "tp2.pp1.zero3", "tp2.pp1.zero2+sp", "tp2.pp2.vpp2.zero1+sp",
]  # fmt: skip
RATES = [1e-3, 8e-4, 6e-4, 4e-4]


def classifier(kind="LlamaForSequenceClassification", labels=1, seed=2, **changes):
    """The backbone of the tests' llama under a random head."""
    source = hf_llama(seed=seed)
    config = transformers.LlamaConfig(
        **{**TINY, "tie_word_embeddings": False, "num_labels": labels, **changes},
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, kind)(config).float().eval()
    if not changes:
        model.model.load_state_dict(source.model.state_dict())
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    root = tmp_path_factory.mktemp("critic")
    save_llama(root / "untied", tied=False)
    save_llama(root / "tied", tied=True)
    save_llama(root / "reference", tied=False, seed=9)
    classifier().save_pretrained(root / "classifier")
    classifier("LlamaForTokenClassification").save_pretrained(root / "tokens")
    classifier(labels=2).save_pretrained(root / "two")
    classifier(vocab_size=100).save_pretrained(root / "other")
    return root, run_ranks("tests.engine.critic_checks:main", 4, {"directory": str(root), "layouts": LAYOUTS}, timeout=300)


@pytest.fixture(scope="module")
def reference():
    model = classifier()
    return train(model, samples(), SETTINGS, RATES), model.state_dict()


def test_values_advantages_and_returns_equal_one_process(ran, reference):
    expected, _ = reference
    for row in ran[1]["trained"]:
        for name in ("values", "advantages", "returns"):
            spread = {"mean": expected[name].mean(), "max": expected[name].max(), "min": expected[name].min()}
            for kind, value in spread.items():
                assert row["metrics"][f"critic/{name}/{kind}"] == pytest.approx(float(value), abs=2e-5), (row["name"], name)
        gap = (expected["returns"] - expected["values"]).var()
        explained = 1 - gap / (expected["returns"].var() + 1e-5)
        assert row["metrics"]["critic/vf_explained_var"] == pytest.approx(float(explained), abs=1e-4)


def test_loss_and_gradient_of_four_steps_equal_one_process(ran, reference):
    expected, weights = reference
    assert [row["layout"] for row in ran[1]["trained"]] == LAYOUTS
    for row in ran[1]["trained"]:
        assert [s["loss"] for s in row["steps"]] == pytest.approx([s["loss"] for s in expected["steps"]], rel=1e-5)
        assert [s["norm"] for s in row["steps"]] == pytest.approx([s["norm"] for s in expected["steps"]], rel=1e-5)
        assert "tp1" in row["layout"] or max(s["rows"] for s in row["steps"]) >= 2, "several micro-batches"
        assert row["metrics"]["critic/vf_clipfrac"] > 0, "nothing was clipped: the test would not see the clip"
        found = transformers.AutoModelForSequenceClassification.from_pretrained(ran[0] / "out" / row["name"]).state_dict()
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            error = (found[name] - value).abs().max() / value.abs().max()
            assert error < 1e-5, (row["name"], name, float(error))


def test_a_critic_that_waits_on_the_host_learns_bit_for_bit_the_same(ran):
    root, facts = ran
    runs = {row["name"]: row for row in [*facts["trained"], *facts["waiting"]]}
    waiting = [row for row in runs.values() if row["where"] == "host"]
    assert len(waiting) == 3
    for leave in waiting:
        stay = runs[leave["name"].replace("-host-", "-device-")]
        assert (stay["away"][0], leave["away"]) == (False, [True, 0])
        assert stay["away"][1] > 0 and stay["steps"] == leave["steps"]
        for file in sorted((root / "out" / stay["name"]).glob("*.safetensors")):
            assert file.read_bytes() == (root / "out" / leave["name"] / file.name).read_bytes(), leave["name"]


def test_a_new_critic_has_one_row_and_no_second_embedding(ran):
    """A tied policy over two stages: VERL#5870 hung there, miles#2878 built a head over the vocabulary."""
    fresh = ran[1]["fresh"]
    for stage, held in fresh["held"]:
        names = (
            {"embedding.word_embeddings.weight"} if stage == 0 else {"decoder.final_layernorm.weight", "value_head.weight"}
        )
        assert set(held) == names
        assert stage == 0 or held["value_head.weight"] == [1, TINY["hidden_size"]]
    assert not any(fresh["values"]) and fresh["grad_norm"] > 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(ran[0] / "out" / "fresh")
    assert model.score.weight.shape == (1, TINY["hidden_size"]) and model.score.weight.abs().max() > 0


def test_a_frozen_critic_has_transformers_values_and_no_optimiser(ran):
    model = classifier("LlamaForTokenClassification")
    with torch.no_grad():
        expected = torch.cat([values_of(model, s) for s in samples() if s.valid])
    for row in ran[1]["frozen"]:
        assert row["metrics"]["critic/values/mean"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert row["metrics"]["critic/values/max"] == pytest.approx(float(expected.max()), abs=1e-5)
        assert row["frozen"] and row["again"] and row["trainable"] == 0 and "frozen" in row["update"]
        assert row["away"] == [row["where"] == "host"] * 3


def test_without_a_critic_returns_are_scores_less_the_penalty(ran):
    """verl's apply_kl_penalty and compute_reinforce_plus_plus_outcome_advantage, written out for each response."""
    policy, reference = hf_llama(), hf_llama(seed=9)
    kls, rewards, returns = [], [], []
    for s in (s for s in samples() if s.valid):
        tokens = torch.tensor(s.prompt_ids + s.response_ids)
        with torch.no_grad():
            pair = [response_logprobs(m, tokens, len(s.prompt_ids), TEMPERATURE) for m in (policy, reference)]
        kls.append(pair[0] - pair[1])
        reward = -0.3 * kls[-1]
        reward[-1] += s.score
        rewards.append(reward.sum())
        n = len(reward)
        discounts = [SETTINGS["gamma"] ** torch.arange(n - t) for t in range(n)]
        returns += [(reward[t:] * discounts[t]).sum() for t in range(n)]
    expected = torch.stack(returns)
    advantages = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    for row in ran[1]["penalised"]:
        assert row["actor/reward_kl_penalty"] == pytest.approx(float(torch.cat(kls).mean()), abs=1e-5)
        for name, value in (("rewards", torch.stack(rewards)), ("returns", expected), ("advantages", advantages)):
            found = [row[f"critic/{name}/{kind}"] for kind in ("mean", "max", "min")]
            assert found == pytest.approx([float(value.mean()), float(value.max()), float(value.min())], abs=2e-5), name
        assert "critic/values/mean" not in row


def test_a_reward_model_scores_as_transformers_does(ran):
    model = classifier()
    with torch.no_grad():
        expected = [float(model(torch.tensor([s.prompt_ids + s.response_ids])).logits) for s in samples()]
    assert ran[1]["scores"] == pytest.approx(expected, abs=1e-5)


def test_wrong_critics_are_refused(ran):
    two, other, language = ran[1]["errors"]
    assert "without a head" in language and "ForSequenceClassification" in language
    assert "num_labels = 2" in two and "expected num_labels = 1" in two
    assert "vocabulary of 100 tokens" in other and "253" in other
