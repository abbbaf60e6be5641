import json
import math
import threading
import time

import pytest

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards.functions import RewardError
from rl3d.rewards.runner import RewardFailure, RewardRunner, as_runner

PROMPT = Prompt("0", 0, "q", None, [1], answer="a")


def sample(i, text=""):
    return Sample(f"0-{i}", 0, i, [1], [2], [0.0], "stop", text=text or str(i))


def run(runner, samples):
    return [future.result(timeout=60) for future in [runner.submit(s, PROMPT) for s in samples]]


def test_scores_come_back_with_their_samples_in_any_order():
    def slow_for_early_ones(prompt, response):
        time.sleep(0.05 if int(response) < 4 else 0)
        return int(response)

    with RewardRunner([slow_for_early_ones], workers=4) as runner:
        out = run(runner, [sample(i) for i in range(16)])
    assert [(s.uid, s.score, s.failed) for s in out] == [(f"0-{i}", float(i), False) for i in range(16)]
    assert runner.scored_total == 16 and runner.failed_total == 0


def test_several_rewards_are_weighted_and_shown():
    def length(prompt, response):
        return len(response)

    def right(response, answer):
        return response == answer

    with RewardRunner([(length, 0.5), (right, 2.0)]) as runner:
        out = run(runner, [sample(0, "a"), sample(1, "bb")])
    assert [s.score for s in out] == [2.5, 1.0]
    assert out[0].info["rewards"] == {"length": 1.0, "right": 1.0}


def test_calls_run_side_by_side_while_the_caller_goes_on():
    together = threading.Barrier(4, timeout=60)

    def meets_the_others(prompt, response):
        together.wait()
        return 1

    with RewardRunner([meets_the_others], workers=4) as runner:
        futures = [runner.submit(sample(i), PROMPT) for i in range(4)]
        assert all(future.result(timeout=60).score == 1 for future in futures)


def raises(prompt, response):
    if response == "3":
        raise RuntimeError("verifier is down")
    return 0.25


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (raises, "RuntimeError: verifier is down"),
        (lambda prompt, response: None if response == "3" else 0.25, "RewardError"),
        (lambda prompt, response: math.nan if response == "3" else 0.25, "RewardError"),
    ],
)
def test_a_failing_reward_costs_its_sample_and_is_no_score(reward, error, caplog):
    with RewardRunner([reward], max_failure_rate=0.2) as runner:
        original = sample(3)
        out = run(runner, [sample(0), sample(1), sample(2), original, sample(4)])
        assert [s.score for s in out] == [0.25, 0.25, 0.25, None, 0.25]
        assert out[3].failed and error in out[3].info["error"] and "Traceback" in out[3].info["traceback"]
        json.dumps(out[3].info)  # it travels to the other ranks
        assert not original.failed
        assert runner.check_failures(out) == 1 and runner.failed_total == 1
        assert "1 of 5 samples could not be scored and are left out of the loss; the first, 0-3" in caplog.text


def test_one_failing_reward_of_several_fails_the_sample_and_the_others_do_not_bring_it_back():
    with RewardRunner([raises, (lambda prompt, response: 1.0, 3.0)]) as runner:
        out = run(runner, [sample(3), sample(4)])
    assert out[0].failed and out[0].score is None and out[1].score == 3.25


def test_too_many_failures_end_the_run_with_the_first_traceback():
    def outage(prompt, response):
        raise ConnectionError("connection refused")

    with RewardRunner([outage], max_failure_rate=0.5) as runner:
        out = run(runner, [sample(i) for i in range(4)])
        with pytest.raises(RewardFailure) as error:
            runner.check_failures(out)
    text = str(error.value)
    assert "4 of 4 samples could not be scored, more than reward.max_failure_rate=0.5; the first, 0-" in text
    assert "in outage" in text and "ConnectionError: connection refused" in text


def test_a_call_that_hangs_is_given_up_and_does_not_hold_up_the_others():
    release = threading.Event()

    def hangs(prompt, response):
        if response == "0":
            release.wait(100)
        return 1.0

    with RewardRunner([hangs], workers=1, timeout_s=1.0) as runner:
        start = time.monotonic()
        out = run(runner, [sample(0), sample(1), sample(2)])
        assert time.monotonic() - start < 25
        assert [s.failed for s in out] == [True, False, False]
        assert out[0].info["error"] == "TimeoutError: reward hangs took more than reward.timeout_s=1 s"
        release.set()  # the late result changes nothing
        time.sleep(0.1)
        assert out[0].score is None and runner.scored_total == 2


def test_a_reward_that_always_hangs_is_not_waited_for_sample_by_sample():
    release = threading.Event()
    with RewardRunner([lambda prompt, response: release.wait(100)], workers=2, timeout_s=0.1) as runner:
        start = time.monotonic()
        out = run(runner, [sample(i) for i in range(200)])
        assert time.monotonic() - start < 25 and all(s.failed for s in out)
        assert "not tried after" in out[-1].info["error"]
        release.set()


def test_time_limits_need_no_signals_and_work_off_the_main_thread():
    found = []

    def elsewhere():
        with RewardRunner([lambda prompt, response: 1.0]) as runner:
            found.append(runner.score(sample(0), PROMPT).score)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert found == [1.0]


def test_closing_leaves_no_one_waiting():
    started, release = threading.Event(), threading.Event()

    def waits(prompt, response):
        started.set()
        release.wait(10)
        return 1.0

    runner = RewardRunner([waits], workers=1)
    futures = [runner.submit(sample(i), PROMPT) for i in range(3)]
    started.wait(10)
    runner.close()
    assert [f.result(timeout=60).failed for f in futures[1:]] == [True, True]
    release.set()
    assert futures[0].result(timeout=60).score == 1.0
    with pytest.raises(RewardError, match="closed"):
        runner.submit(sample(9), PROMPT)


def test_what_users_give_becomes_a_runner():
    with as_runner("rl3d.rewards.tiny:score", workers=1) as runner:
        assert as_runner(runner) is runner
        assert runner.score(sample(0, "a a"), PROMPT).score == 0.25
    with as_runner([(len_of, 2.0), len_of]) as runner:
        assert runner.score(sample(0, "abc"), PROMPT).score == 9.0
    with pytest.raises(RewardError, match="at least one"):
        RewardRunner([])


def len_of(prompt, response):
    return len(response)
