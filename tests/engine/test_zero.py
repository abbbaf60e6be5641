"""Which ZeRO stage runs for which layout, and what DeepSpeed is told."""

import itertools

import pytest

from rl3d.config import zero_problem
from rl3d.engine.zero import AdamSettings, deepspeed_config, stage_run
from rl3d.layout import TrainLayout


def test_a_stage_is_run_as_asked_or_the_reason_is_given():
    for stage, pp, bf16 in itertools.product(range(4), (1, 2), (False, True)):
        if stage == 3 and pp == 2:
            continue
        run, why = stage_run(stage, pp, bf16)
        assert (run == stage) == (why == "")
        assert (run != stage) == ((stage == 0 and bf16) or (stage == 2 and pp == 2)), (stage, pp, bf16)
        assert why == "" or f"zero{stage}" in why and "zero1" in why


@pytest.mark.parametrize(
    ("layout", "offload", "words"),
    [
        ("tp2.pp2.zero3", "none", "pp1.zero3"),
        ("tp2.zero0", "optimizer", "write zero1"),
        ("tp2.zero1", "params", "write zero3 for zero1"),
        ("tp2.zero3", "params", None),
        ("pp2.zero2", "optimizer", None),
        ("zero0", "none", None),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(layout, offload, words):
    problem = zero_problem(TrainLayout.parse(layout), offload)
    assert (problem is None) if words is None else (words in problem)


def test_gradients_are_accumulated_and_reduced_in_fp32_and_the_user_is_heard():
    given = {"zero_optimization": {"reduce_bucket_size": 7, "overlap_comm": True}}
    config = deepspeed_config(AdamSettings(max_grad_norm=0.5), 2, True, 1000, "optimizer", False, given)
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert config["gradient_clipping"] == 0.5
    # DeepSpeed's own clipping is wrong at stage 0 for tied and replicated parameters: ours is used
    assert deepspeed_config(AdamSettings(max_grad_norm=0.5), 0, False, 1000, "none", False, {})["gradient_clipping"] == 0.0
