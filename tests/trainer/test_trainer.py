"""Training runs on two ranks: resuming, flows of one's own, failing rewards, what a run leaves behind."""

import json

import pytest
import transformers

from rl3d.data.tiny import make_tiny_model
from tests.ranks import run_ranks

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
TIMED = ("timing_s/", "perf/")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trainer")
    make_tiny_model(directory / "model", CONFIG, seed=3)
    return directory


@pytest.fixture(scope="module")
def facts(root):
    return run_ranks("tests.trainer.trainer_checks:main", 2, {"directory": str(root)}, timeout=240)


def _rows(root, name):
    return [json.loads(line) for line in (root / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_three_steps_and_three_after_resuming_equal_six(root, facts):
    assert facts["stopped"] == [True, 3, False, True, 1], "SIGUSR1 to one rank ends all after the step, with a checkpoint"
    assert facts["equal"], "weights differ between a straight run and a resumed one"
    straight, halves = _rows(root, "whole"), _rows(root, "halves")
    assert [row["step"] for row in halves] == list(range(6))
    for a, b in zip(straight, halves, strict=True):
        same = {k for k in a if not k.startswith(TIMED)}
        assert {k: a[k] for k in same} == {k: b[k] for k in same}


def test_a_run_with_a_critic_resumes_bit_for_bit(root, facts):
    ppo = facts["ppo"]
    assert ppo["policy"] and ppo["critic"], "weights differ between a straight run and a resumed one"
    straight, halves = _rows(root, "ppo"), _rows(root, "ppo-halves")
    assert [row["step"] for row in halves] == list(range(6))
    for a, b in zip(straight, halves, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(TIMED)} == {k: b[k] for k in a if not k.startswith(TIMED)}
    assert ppo["steps"][:2] == [5 * 2 * 2, 6 * 2 * 2], "the first step is the critic's alone"
    assert "actor/pg_loss" not in straight[0] and "actor/pg_loss" in straight[1]
    assert straight[0]["critic/lr"] == pytest.approx(3e-3 * 4 / 6) and straight[0]["critic/lr"] < straight[1]["critic/lr"], (
        "the critic warms up by a schedule of its own"
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(root / "runs" / "ppo" / "critic")
    assert model.score.weight.shape == (1, CONFIG["hidden_size"])
    assert "trains no critic" in ppo["mixed"] and "holds one" in ppo["mixed"]


def test_metrics_of_a_run_with_a_critic(root, facts):
    for row in _rows(root, "ppo"):
        for key in ("timing_s/values", "timing_s/update_critic", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean",
                    "critic/grad_norm", "critic/lr", "critic/values/mean", "critic/values/max", "critic/values/min",
                    "critic/advantages/mean", "critic/returns/mean", "critic/vf_explained_var",
                    "actor/reward_kl_penalty"):  # fmt: skip
            assert isinstance(row[key], int | float), key
        assert abs(row["critic/advantages/mean"]) < 1e-6, "whitened"
    first, last = _rows(root, "ppo")[0], _rows(root, "ppo")[-1]
    assert first["critic/values/max"] == first["critic/values/min"] == 0.0
    assert last["critic/rewards/mean"] != last["critic/score/mean"], "the KL is paid out of the reward"
    assert last["critic/vf_loss"] < first["critic/vf_loss"]


def test_a_frozen_critic_and_none_at_all(root, facts):
    ppo = facts["ppo"]
    assert ppo["frozen"] and ppo["steps"][2] == 0 and ppo["none"]
    frozen, none = _rows(root, "ppo-frozen")[0], _rows(root, "ppo-none")[0]
    assert "critic/vf_loss" not in frozen and frozen["critic/values/max"] > frozen["critic/values/min"]
    assert "critic/values/mean" not in none and abs(none["critic/advantages/mean"]) < 1e-6
    assert not (root / "runs" / "ppo-frozen" / "critic").exists()


def test_scores_of_a_reward_model_are_added_at_the_phase_boundary(root, facts):
    samples = [
        json.loads(line) for line in next((root / "runs/ppo-scored/samples").glob("*.jsonl")).read_text().splitlines()
    ]
    assert len(samples) == 24 and len({row["reward_model"] for row in samples}) > 1
    for row in samples:
        assert row["score"] == pytest.approx(1.0 + 0.5 * row["reward_model"])
    assert facts["ppo"]["scored"] == pytest.approx(sum(row["score"] for row in samples) / 24)


def test_a_finished_run_has_nothing_left_to_do(facts):
    assert facts["again"] == {}
    assert facts["old_run"] == 6 * 2 * 2  # steps x epochs x mini-batches


def test_callbacks_see_every_step(facts):
    assert [step for step, _ in facts["callbacks"]] == list(range(6))
    assert facts["callbacks"][-1][1] == facts["last"]["reward_mean"]


def test_rewarding_can_be_doubled(facts):
    assert facts["scored"] == facts["distinct"] == 6 * 4


def test_a_lost_sample_is_named(facts):
    assert "1 samples are missing" in facts["lossy"] or "2 samples are missing" in facts["lossy"]


def test_failed_rewards_cost_their_samples_only(facts):
    assert 0 < facts["failed"] < 24 and facts["failed"] % 4 == 0
    assert facts["finite"] > 0
    assert "service is down" in facts["broken"] and "24 of 24" in facts["broken"]


def test_what_a_run_leaves_behind(root, facts):
    run = root / "runs" / "whole"
    for name in ("metrics.jsonl", "tensorboard", "samples", "checkpoints/latest", "hf/config.json"):
        assert (run / name).exists(), name
    row = _rows(root, "whole")[-1]
    for key in ("timing_s/gen", "timing_s/reward", "timing_s/old_log_prob", "timing_s/ref", "timing_s/update_actor",
                "timing_s/update_weights", "timing_s/step", "actor/pg_loss", "actor/entropy", "actor/kl_loss",
                "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "critic/score/mean",
                "critic/advantages/mean", "response_length/mean", "prompt_length/mean", "perf/throughput",
                "training/rollout_probs_diff_max", "training/global_step", "training/epoch"):  # fmt: skip
        assert isinstance(row[key], int | float), key
    assert row["training/rollout_logprobs_diff_max"] < 1e-5
    assert row["training/rollout_filter_shift_mean"] == 0.0  # no filter
    assert all(r["actor/log_ratio_max_first"] < 1e-5 for r in _rows(root, "whole"))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    assert tokenizer.decode(model.generate(**tokenizer("a :", return_tensors="pt"), max_new_tokens=4)[0])


def test_a_script_with_a_model_object_and_rows(root):
    facts = run_ranks("tests.trainer.trainer_checks:script", 1, {"directory": str(root)})
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "model")
    ids = tokenizer(["a :", "b :"], return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    width = expected.shape[1]
    assert [row[:width] for row in facts["greedy"]] == expected.tolist()
    assert "needs a reference model" in facts["errors"][0] and "eps = 0.001" in facts["errors"][1]
    assert facts["stages"] == [3, 2]
    assert facts["steps"] == 2 and facts["reward"] >= 0.5 and facts["reference"]
    assert facts["length"] == CONFIG["max_position_embeddings"]
