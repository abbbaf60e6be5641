"""Names and summaries of metrics, and the lines that a person reads."""

import io
import json
import math

import numpy as np
import pytest
import torch

from rl3d.trainer import metrics
from rl3d.trainer.console import Console


def test_names_are_verls() -> None:
    names = {value for key, value in vars(metrics).items() if key.isupper()}
    expected = """timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv
    timing_s/update_critic timing_s/update_actor perf/mfu/actor
    timing_s/update_weights timing_s/step actor/pg_loss actor/entropy actor/kl_loss actor/ppo_kl actor/pg_clipfrac
    actor/grad_norm actor/lr critic/score critic/rewards critic/advantages critic/returns response_length prompt_length
    perf/throughput perf/total_num_tokens perf/time_per_step perf/max_memory_allocated_gb perf/mfu/actor
    training/rollout_probs_diff_max training/rollout_probs_diff_mean training/rollout_probs_diff_std
    training/global_step training/epoch"""
    ours = {"timing_s/exchange", "timing_s/rows"}  # what verl does in other places
    assert names == {*expected.split(), *ours}


def test_spread_and_lengths() -> None:
    assert metrics.spread("critic/score", [1, 2, 6]) == {
        "critic/score/mean": 3.0,
        "critic/score/max": 6.0,
        "critic/score/min": 1.0,
    }
    assert metrics.spread("critic/score", []) == {}
    assert metrics.lengths("response_length", [4, 8, 8, 2], limit=8)["response_length/clip_ratio"] == 0.5
    assert math.isnan(metrics.spread("x", [1.0, math.nan])["x/mean"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(math.nan), "NaN"),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (True, True),
        ({"a": [math.nan, (1, 2)]}, {"a": ["NaN", [1, 2]]}),
        (None, None),
    ],
)
def test_json_values(value: object, expected: object) -> None:
    found = metrics.json_value(value)
    assert found == expected and type(found) is type(expected)
    json.dumps(found, allow_nan=False)


def test_console_lines_as_promised() -> None:
    out = io.StringIO()
    console = Console(file=out)
    console.sampling(0, 32, 32)
    console.rewarding(0, 32)
    console.updating(0, 4)
    console.result(0, 1.8241, 1.0016, 0.0417)
    assert out.getvalue().splitlines() == [
        "[Step 0] Sampling 32 prompts → 32 responses",
        "[Step 0] Computing rewards for 32 samples...",
        "[Step 0] Updating actor with 4 mini-batches...",
        "[Step 0] Actor loss: 1.824 | Reward mean: 1.002 | KL: 0.042",
    ]


def test_console_that_is_off_says_nothing() -> None:
    out = io.StringIO()
    console = Console(enabled=False, file=out)
    console.sampling(0, 1, 1)
    with console.progress("sampling", 3) as advance:
        advance(3)
    assert out.getvalue() == ""


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl3d.trainer.console.PLAIN_EVERY_S", 0.0)
    out = io.StringIO()
    with Console(file=out).progress("sampling", 3) as advance:
        advance(2)
        advance(1)  # all done: the line of the next phase says so
    assert out.getvalue() == "sampling: 2 of 3, 0 s\n"


def test_progress_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with pytest.raises(RuntimeError, match="inside"), Console(file=out).progress("sampling", 3) as advance:
        advance(1)
        raise RuntimeError("inside")
    assert "sampling" in out.getvalue()
