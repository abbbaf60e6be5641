"""Engines with a model of their own (rollout.engine: hf) get the trained weights, from every kind of training layout."""

import pytest
import torch
import transformers

from tests.engine.fed_checks import LAYOUTS
from tests.ranks import run_ranks
from tests.reference import response_logprobs, save_llama

COLUMNS = 12


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    root = tmp_path_factory.mktemp("fed")
    for tied in (False, True):
        save_llama(root / ("tied" if tied else "untied"), tied)
    return run_ranks("tests.engine.fed_checks:main", 2, {"directory": str(root), "out": str(root)}, timeout=240)


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_it_generates_with_the_trained_weights(facts, index):
    found = facts["actors"][index]
    model = transformers.AutoModelForCausalLM.from_pretrained(found["weights"]).eval()
    for row in found["greedy"]:
        prompt, response = [t for t in row[:COLUMNS] if t != 0], row[COLUMNS:]
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=len(response),
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert response == expected
    for row, logprobs in zip(found["sampled"][0], found["logprobs"][0], strict=True):
        prompt = [t for t in row[:COLUMNS] if t != 0]
        with torch.no_grad():
            expected = response_logprobs(model, torch.tensor(prompt + row[COLUMNS:]), len(prompt), 0.8)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)
    assert found["sampled"][0] != found["before"]


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_it_samples_what_the_built_in_engine_samples(facts, index):
    fed, ours = facts["actors"][index]["sampled"]
    assert fed == ours


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_no_rank_holds_more_than_a_bucket_beside_its_model(facts, index):
    found = facts["actors"][index]
    assert found["buckets"] > 4 and found["widest"] <= 100_000 < found["model"] / 4
    # every rank gets the whole model once, from itself or from others
    assert sum(found["moved"]) == 2 * found["model"]


def test_what_such_an_engine_cannot_do_is_refused(facts):
    refused = facts["refused"]
    assert "engine 'hf' runs a whole model on one rank, tp is 2" in refused["tp"]
    assert "verify = 'full'" in refused["verify"] and "training_copy = 'drop'" in refused["drop"]


def test_a_loader_that_fails_leaves_nobody_waiting(facts):
    told = facts["broken"]["told"]
    assert all("no room for the second tensor" in message for message, _ in told)
    assert all(still_training for _, still_training in told) and facts["broken"]["after"] == [6, 14]
