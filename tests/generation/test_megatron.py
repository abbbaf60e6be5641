"""The built-in generator against transformers, at TP 1, 2 and 4 on real ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl3d.generation.engine import Request, SamplingParams
from tests.generation.models import VOCAB, Job, save_model
from tests.ranks import run_ranks
from tests.reference import hf_greedy

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True}, "untied": {"tied": False}, "few_kv_heads": {"tied": False, "kv_heads": 2},
    "qwen2": {"family": "qwen2", "tied": True}, "qwen3": {"family": "qwen3"}, "mistral": {"family": "mistral"},
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Ragged prompts, one of a single token, one with the end-of-sequence (and pad) token inside."""
    generator = torch.Generator().manual_seed(1)
    out = [torch.randint(3, VOCAB, (1 + 6 * i,), generator=generator).tolist() for i in range(7)]
    out[4][7] = out[4][12] = 2
    return out


PROMPTS = prompts()
NEW = [9 + i for i in range(len(PROMPTS))]
GREEDY = [Request(p, SamplingParams(n, temperature=0.0)) for p, n in zip(PROMPTS, NEW)]
SAMPLED = [
    Request(p, SamplingParams(n, temperature=0.9, n=2, seed=7), key=(3, i, 0)) for i, (p, n) in enumerate(zip(PROMPTS, NEW))
]
FILTERED = [  # filters of all kinds in one batch, a greedy and an unfiltered row among them
    Request(p, SamplingParams(n, temperature=t, top_p=top_p, top_k=top_k, seed=7), key=(3, i, 0))
    for i, (p, n, t, top_p, top_k) in enumerate(
        zip(PROMPTS, NEW, [1.2, 0.8, 0.0] * 3, [0.9, 1.0, 0.7, 1.0, 0.95] * 2, [0, 20, 0, 0, 40, 0, 5])
    )
]
ENGINES = {
    "usual": {"max_sequences": 4},
    "pages of 8": {"max_sequences": 5, "page_size": 8},
    "pages of 16, few": {"max_sequences": 9, "page_size": 16, "pages": 6, "body": "megatron"},
    "pages of 3, few, chunks of 7": {"max_sequences": 14, "page_size": 3, "pages": 30, "max_prefill_tokens": 7},
    "fused": {"max_sequences": 5, "page_size": 8, "fused": True},
    "bisection": {"max_sequences": 4, "head": 8},
    "one at a time": {"max_sequences": 1, "max_prefill_tokens": 8, "share_prefixes": False},
}
GREEDY_RUNS = [
    ("tied", 1, "usual"), ("tied", 2, "usual"), ("tied", 4, "usual"),
    ("tied", 2, "pages of 16, few"), ("untied", 1, "usual"), ("untied", 4, "usual"),
    ("few_kv_heads", 4, "pages of 8"), ("untied", 2, "fused"), ("qwen3", 4, "fused"),
    ("tied", 1, "pages of 3, few, chunks of 7"),
    *((family, tp, "pages of 8") for family in ("qwen2", "qwen3", "mistral") for tp in (1, 2, 4)),
]  # fmt: skip
SAMPLED_RUNS = [(1, "usual"), (1, "pages of 8"), (1, "one at a time"), (2, "pages of 8"), (4, "pages of 16, few"),
                (1, "pages of 3, few, chunks of 7"), (2, "pages of 3, few, chunks of 7"),
                (2, "fused")]  # fmt: skip
FILTERED_RUNS = [(1, "usual"), (2, "pages of 8"), (4, "pages of 16, few"), (2, "fused"), (4, "bisection")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("llamas")
    return {name: save_model(root / name, **{"family": "llama", **settings}) for name, settings in MODELS.items()}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> dict[Any, Any]:
    """Results of every job, from one launch of four ranks: (what, model, tp, engine) -> results."""
    jobs: dict[Any, Job] = {}
    for model, tp, name in GREEDY_RUNS:
        jobs["greedy", model, tp, name] = Job(str(models[model]), tp, GREEDY, ENGINES[name])
    for what, requests, runs in (("sampled", SAMPLED, SAMPLED_RUNS), ("filtered", FILTERED, FILTERED_RUNS)):
        for tp, name in runs:
            jobs[what, "tied", tp, name] = Job(str(models["tied"]), tp, requests, ENGINES[name], split=tp < 4)
    jobs["sampled", "tied", 2, "reversed"] = Job(str(models["tied"]), 2, SAMPLED[::-1], ENGINES["pages of 8"])
    result = run_ranks("tests.generation.rank_checks:main", 4, [[job.to_json() for job in jobs.values()]])
    return {**dict(zip(jobs, result["jobs"])), "disagreement": result["disagreement"], "abort": result["abort"]}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return {name: AutoModelForCausalLM.from_pretrained(path).eval() for name, path in models.items()}


def hf_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Log probabilities of all tokens of the vocabulary at every response position, [n, V], by one full forward."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / (temperature or 1.0), -1)


@pytest.mark.parametrize("model", list(MODELS))
def test_greedy_equals_transformers(answers: Any, references: Any, model: str) -> None:
    expected = [hf_greedy(references[model], r.prompt_ids, r.params.max_new_tokens) for r in GREEDY]
    assert len({token for tokens in expected for token in tokens}) > 20  # the model does not just repeat
    for name, tp, engine in GREEDY_RUNS:
        if name == model:
            results = answers["greedy", model, tp, engine]
            assert [r["token_ids"] for r in results] == expected, (tp, engine)
            assert {r["finish_reason"] for r in results} == {"length"}


def test_logprobs_equal_a_full_forward(answers: Any, references: Any) -> None:
    compared = 0
    for (what, model, _, engine), results in ((k, v) for k, v in answers.items() if isinstance(k, tuple)):
        requests = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED}[what]
        if engine == "reversed":
            requests = requests[::-1]
        for result in results:
            request = requests[result["request_index"]]
            full = hf_logprobs(references[model], request.prompt_ids, result["token_ids"], request.params.temperature)
            expected = full.gather(1, torch.tensor(result["token_ids"])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(result["logprobs"]).double(), expected, atol=1e-5, rtol=0)
            compared += len(result["token_ids"])
            assert max(result["token_ids"]) < VOCAB
    assert compared > 1000


@pytest.mark.parametrize("what", ["sampled", "filtered"])
def test_tokens_do_not_depend_on_ranks_batch_slots_or_pages(answers: Any, what: str) -> None:
    runs = {key: value for key, value in answers.items() if key[0] == what and key[3] != "reversed"}
    first = runs[what, "tied", 1, "usual"]
    assert sum(r["small_margins"] for r in first) == 0  # otherwise equality is not promised: choose another seed
    for key, results in runs.items():
        assert [r["token_ids"] for r in results] == [r["token_ids"] for r in first], key
    if what == "sampled":
        backwards = answers[what, "tied", 2, "reversed"]
        by_request = sorted(backwards, key=lambda r: (-r["request_index"], r["sample_index"]))
        assert [r["token_ids"] for r in by_request] == [r["token_ids"] for r in first]
        assert len({tuple(r["token_ids"]) for r in first}) == len(first)  # two samples of a prompt differ


def test_filters_hold_against_transformers(answers: Any, references: Any) -> None:
    """Every drawn token is one that transformers' own warpers would have left in."""
    from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

    for result in answers["filtered", "tied", 2, "pages of 8"]:
        request = FILTERED[result["request_index"]]
        params, tokens = request.params, torch.tensor(result["token_ids"])
        logprobs = hf_logprobs(references["tied"], request.prompt_ids, result["token_ids"], params.temperature)
        if params.temperature == 0:
            assert torch.equal(tokens, logprobs.argmax(-1))
            continue
        warpers = LogitsProcessorList()
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        left = warpers(None, logprobs)
        assert all(math.isfinite(x) for x in left.gather(1, tokens[:, None])[:, 0].tolist())


def test_ranks_with_different_requests_are_told(answers: Any) -> None:
    assert "different requests" in answers["disagreement"]


def test_one_rank_can_abort_for_all(answers: Any) -> None:
    (cut, tokens), (kept, others) = answers["abort"]
    assert (cut, kept) == ("abort", "length") and 3 <= len(tokens) <= 3 + 8 and len(others) == 40
