import math
import sys

import pytest
import torch

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards import tiny
from rl3d.rewards.functions import RewardError, RewardFunction, resolve_reward

SAMPLE = Sample("5-1", 5, 1, [1, 2], [3, 4, 5], [0.0] * 3, "stop", text="forty two")
PROMPT = Prompt("5", 5, "6 x 7?", None, [1, 2], answer=42, data_source="sums", extra={"level": 3})


def score(fn, prompt=PROMPT, **kwargs):
    return RewardFunction(fn, kwargs)(SAMPLE, prompt)


def test_prompt_and_response_by_position_or_name():
    assert score(lambda prompt, response: len(prompt) * 100 + len(response)) == 609
    assert score(lambda response, prompt: len(prompt) * 100 + len(response)) == 609
    assert score(lambda p, r: len(p) * 100 + len(r)) == 609
    assert score(lambda question, completion, answer: len(question) * 100 + len(completion) + answer) == 651
    assert score(lambda response: len(response)) == 9


def test_columns_reach_the_function_by_name():
    def reward(prompt, response, *, answer, data_source, level, response_ids, prompt_ids, finish_reason="x", other=7):
        assert (prompt, response, data_source, finish_reason) == ("6 x 7?", "forty two", "sums", "stop")
        return answer + level + len(response_ids) + len(prompt_ids) + other

    assert score(reward) == 42 + 3 + 3 + 2 + 7
    assert score(reward, other=0) == 50
    assert score(reward, level=10) == 42 + 10 + 3 + 2 + 7  # given arguments win over columns
    seen = {}

    def everything(response, **rest):
        seen.update(rest)
        return 0

    score(everything)
    assert seen["level"] == 3 and seen["answer"] == 42 and "response" not in seen


def test_a_conversation_gives_its_last_user_message():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "second"},
    ]
    prompt = Prompt("1", 1, None, messages, [1])
    assert score(lambda prompt, response, messages: len(prompt) + 100 * len(messages), prompt) == 406


def test_what_is_asked_for_and_missing_is_named():
    with pytest.raises(RewardError, match="asks for 'solution', which sample 5-1 does not have; there is level, prompt"):
        score(lambda prompt, response, solution: 1)
    with pytest.raises(RewardError, match="asks for 'completion'"):
        score(lambda completion, answer: 1)  # not guessed: the first of the two might be either
    with pytest.raises(RewardError, match="has no parameter wight"):
        RewardFunction(lambda prompt, response, weight=1: 1, {"wight": 2})


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "good", [1, 2]])
def test_what_is_no_score_is_an_error(value):
    with pytest.raises(RewardError, match="returned .* for sample 5-1; expected a"):
        score(lambda prompt, response: value)


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1.0)])
def test_numbers_of_all_kinds_are_scores(value):
    assert score(lambda prompt, response: value) == 1.0 and type(score(lambda p, r: value)) is float


def test_functions_are_found_by_module_and_by_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rewards_by_name.py").write_text("class Box:\n    @staticmethod\n    def one(p, r): return 1\n")
    (tmp_path / "mine.py").write_text("def length(prompt, response, scale=1): return scale * len(response)\n")
    assert resolve_reward("my_rewards_by_name:Box.one")(SAMPLE, PROMPT) == 1
    assert resolve_reward("mine.py:length", {"scale": 2})(SAMPLE, PROMPT) == 18
    assert resolve_reward(str(tmp_path / "mine.py") + ":length")(SAMPLE, PROMPT) == 9
    assert resolve_reward("rl3d.rewards.tiny:score").name == "rl3d.rewards.tiny:score"
    (tmp_path / "broken_reward.py").write_text("import rl3d_missing_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="rl3d_missing_dependency"):
        resolve_reward("broken_reward:f")
    for function, message in [
        ("mine.py:width", "has no 'width'"),
        ("gone.py:f", "no such file"),
        ("no_such_rewards:f", "no module"),
        ("rl3d.no_such:f", "no module"),
        ("score", "expected module:name"),
        ("math:pi", "expected a function"),
    ]:
        with pytest.raises(RewardError, match=message):
            resolve_reward(function)


def test_reasoning_gym_scores_with_the_tasks_own_verifier():
    from rl3d.data.sources import load_rows

    row = load_rows("reasoning_gym:chain_sum", size=1, seed=1)[0]
    prompt = Prompt("0", 0, row.prompt, None, [1], row.answer, row.data_source, row.extra)

    def verify(text, **kwargs):
        reward = resolve_reward("reasoning_gym", kwargs)
        return reward(Sample("0-0", 0, 0, [1], [2], [0.0], "stop", text=text), prompt)

    tagged = f"I think <answer> {row.answer} </answer>"
    assert verify(row.answer) == verify(f" {row.answer}\n") == verify(tagged) == verify(tagged, extract="tag") == 1.0
    assert verify(row.answer, extract="tag") < 0.1
    assert 0 < verify(f"It is {row.answer}") < 1 and 0 < verify(tagged, extract="text") < 1
    with pytest.raises(RewardError, match="extract='all'"):
        verify("1", extract="all")
    with pytest.raises(RewardError, match="no reasoning-gym entry"):
        resolve_reward("reasoning_gym")(SAMPLE, PROMPT)


def test_the_tiny_rule():
    assert tiny.score("c c c c c c c c", "c") == 1.0
    assert tiny.score("c c c c", "c") == 0.5
    assert tiny.score("c" * 8 + "x" * 8, "c") == 0.5
    assert tiny.score("", "c") == 0.0
