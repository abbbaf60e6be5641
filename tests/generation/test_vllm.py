"""vLLM as the engine, for real: new weights change its outputs to what they give, at TP 1 and 2. `make vllm` installs it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation.models import save_model
from tests.generation.vllm_checks import CASES, NEW_TOKENS
from tests.ranks import run_ranks
from tests.reference import hf_greedy

pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm` installs it for a CPU")
COLUMNS = 48


@pytest.fixture(scope="module", params=CASES, ids=[c[0] for c in CASES])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, train, gen = request.param
    root = tmp_path_factory.mktemp("vllm")
    heads = 2 if family == "qwen2" else 4  # its head is hidden / heads, and vLLM's kernels for a CPU want 32
    save_model(root / family, family, tied=family == "qwen2", heads=heads, kv_heads=2, head_dim=32)
    ranks = 1 if gen == "tp1" else 2
    facts = run_ranks("tests.generation.vllm_checks:main", ranks, {"directory": str(root), "only": family}, timeout=600)
    return root / family, facts


def rows(sequences: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    return [([t for t in row[:COLUMNS] if t != 0], row[COLUMNS:]) for row in sequences]


def test_outputs_are_those_of_the_new_weights(case: tuple[Path, Any]) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    directory, facts = case
    answers = []
    for index, found in enumerate(facts["rounds"]):
        place = directory if index == 0 else directory.with_name(f"{directory.name}-{index}")
        model = AutoModelForCausalLM.from_pretrained(place).eval()
        for prompt, response in rows(found["greedy/vllm"][0]):
            assert response == hf_greedy(model, prompt, NEW_TOKENS)
        for name, temperature in (("plain", 1.0), ("cool", 0.7)):
            sequences, logprobs = found[f"{name}/vllm"]
            for (prompt, response), given in zip(rows(sequences), logprobs, strict=True):
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
                wanted = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(given), wanted, atol=1e-4, rtol=0)
        answers.append(found["greedy/vllm"][0])
    assert answers[0] != answers[1] != answers[2]


def test_vllm_samples_what_the_built_in_engine_samples(case: tuple[Path, Any]) -> None:
    for found in case[1]["rounds"]:
        for name in ("plain", "cool", "greedy"):
            assert found[f"{name}/vllm"][0] == found[f"{name}/ours"][0], name


def test_requests_keep_their_lengths_stops_and_numbers(case: tuple[Path, Any]) -> None:
    requests = case[1]["requests"]
    for mine, theirs in zip(requests["vllm"], requests["ours"], strict=True):
        numbers, others = mine.pop("logprobs"), theirs.pop("logprobs")
        assert mine == theirs
        for a, b in zip(numbers, others, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert [len(r["tokens"]) for r in requests["vllm"]][:3] == [0, 1, 1]
    assert requests["vllm"][3]["reason"] == "stop" and requests["vllm"][4]["reason"] == "length"
    assert requests["vllm order"][0] == "none" and requests["vllm order"][-1] == "last"
    cut, kept = requests["vllm aborted"]
    assert cut["reason"] == "abort" and 2 <= len(cut["tokens"]) < 40
    assert cut["tokens"] == requests["ours aborted"][0]["tokens"][: len(cut["tokens"])] or len(cut["tokens"]) > len(
        requests["ours aborted"][0]["tokens"]
    )
    assert kept["tokens"] == requests["ours aborted"][1]["tokens"]
