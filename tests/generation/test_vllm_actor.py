"""``VLLMActor`` for real: after every update vLLM gives what transformers gives on the new weights, whoever started it.

On one GPU: ``RL3D_TEST_DEVICE=cuda pytest tests/generation/test_vllm_actor.py -k "not tp2"``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation.models import save_model
from tests.generation.test_vllm import rows
from tests.generation.vllm_actor_checks import CASES
from tests.generation.vllm_checks import NEW_TOKENS
from tests.ranks import DEVICE, run_ranks
from tests.reference import hf_greedy

pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm` installs it for a CPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vllm-actor")
    save_model(root / "model", "qwen3", tied=True, heads=4, kv_heads=2, head_dim=32)
    save_model(root / "other", "llama", tied=False, heads=4, kv_heads=2, head_dim=32)
    return root / "model"


@pytest.fixture(scope="module", params=CASES)
def facts(request: Any, place: Path) -> Any:
    args = {"directory": str(place), "case": request.param}
    return request.param, run_ranks("tests.generation.vllm_actor_checks:main", CASES[request.param][1], args, timeout=600)


def test_generates_with_the_weights_of_the_last_update(facts: tuple[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    answers = []
    for found in facts[1]["rounds"]:
        model = AutoModelForCausalLM.from_pretrained(found["weights"]).eval()
        for prompt, response in rows(found["greedy"]):
            assert response == hf_greedy(model, prompt, NEW_TOKENS)
        for (prompt, response), given in zip(rows(found["sampled"]), found["logprobs"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(given), wanted, atol=1e-4, rtol=0)
        answers.append(found["greedy"])
    assert answers[0] != answers[1] != answers[2]


def test_vllm_sleeps_during_training_where_it_can_and_its_weights_are_stale(facts: tuple[str, Any]) -> None:
    found = facts[1]
    assert "ModeError: generate() needs generation mode" in found["training"]
    if DEVICE == "cuda":
        assert all(round["cache"][1] < -(1 << 30) for round in found["rounds"]) and found["asleep"]
        assert "StaleWeightsError: generation weights were never loaded" in found["stale"]
    else:
        assert all(round["cache"] == [0, 0] for round in found["rounds"]) and not found["asleep"]
        assert "StaleWeightsError: generation weights have version 4, expected 6" in found["stale"]


def test_vllm_holds_the_cache_of_the_memory_plan_and_leaves_no_files(facts: tuple[str, Any]) -> None:
    if "memory" not in facts[1]:
        pytest.skip("a cache of the user's choice, or of what the device has")
    found, planned = facts[1]["memory"]
    assert planned == pytest.approx(found, rel=1e-3)
    assert not list(Path("/dev/shm").glob("*-cpushm_*")), "shared memory that outlives the job"


def test_requests_of_an_async_engine_stream_and_end_by_name(facts: tuple[str, Any]) -> None:
    if facts[0] != "async":
        pytest.skip("there is no AsyncLLM")
    stopped = facts[1]["stopped"]
    assert stopped["order"][-1] == "long" and sorted(stopped["order"]) == ["cut", "long", "short"]
    (_, why, length), cut, (_, _, short) = stopped["ends"]
    assert (why, length, short) == ("length", 60, 3) and cut[1] == "abort" and cut[2] < 60
    assert "this is its event loop's own thread; call the actor in another thread" in facts[1]["inside"]


def test_engines_that_do_not_fit_are_refused_with_what_to_do(facts: tuple[str, Any]) -> None:
    if facts[0] != "ready":
        pytest.skip("asked once, where a ready engine is in this process")
    said = facts[1]["refused"]
    for text in ("model: family", "torch.bfloat16: the actor trains in torch.float32", "max_model_len = 64",
                 "logits_processors = []: rl3d draws the tokens", "**rl3d.vllm_options()"):  # fmt: skip
        assert text in said["other"], (text, said["other"])
    assert "gpu_memory_utilization) come too late for a ready engine" in said["options"]
    assert "engine is a object; expected a name, a vllm.LLM or an AsyncLLM" in said["kind"]
    assert DEVICE == "cuda" or "enable_sleep_mode = True: on a CPU vLLM cannot sleep" in said["sleep"]
    assert "contradict each other" in said["both"]
    assert "leave num_gpus out" in said["session"]
    assert "at work on 1 requests" in said["busy"]
