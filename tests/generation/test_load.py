"""Which engine an actor's arguments ask for, and what is said where it cannot be had."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import rl3d
from rl3d.generation import GenerationError
from rl3d.generation.load import chosen_engine
from rl3d.generation.vllm import VLLMGenerator

READY = object()


@pytest.mark.parametrize(
    ("engine", "use_vllm", "found"),
    [
        (None, None, ("megatron", None)),
        ("hf", None, ("hf", None)),
        (None, True, ("vllm", None)),
        ("vllm", True, ("vllm", None)),
        (None, False, ("megatron", None)),
        ("hf", False, ("hf", None)),
        (READY, None, ("vllm", READY)),
        (READY, True, ("vllm", READY)),
    ],
)
def test_an_engine_by_name_by_shorthand_or_ready(engine: Any, use_vllm: bool | None, found: tuple[str, Any]) -> None:
    assert chosen_engine(engine, use_vllm) == found


@pytest.mark.parametrize(("engine", "use_vllm"), [("megatron", True), ("vllm", False), (READY, False)])
def test_contradictions_are_refused(engine: Any, use_vllm: bool) -> None:
    with pytest.raises(ValueError, match=f"use_vllm = {use_vllm} .* leave one of them out"):
        chosen_engine(engine, use_vllm)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_named(tmp_path: Path) -> None:
    limits = {"max_sequences": 1, "max_sequence_length": 8, "vocab_size": 8}
    with pytest.raises(GenerationError, match="engine 'vllm': vLLM cannot be imported .* install it, or use engine"):
        VLLMGenerator(tmp_path, None, device=torch.device("cpu"), dtype=torch.float32, **limits)  # type: ignore[arg-type]


def test_a_session_has_no_engine_of_this_process() -> None:
    with pytest.raises(ValueError, match="engine is a object of this process, and num_gpus = 2 starts ranks in others"):
        rl3d.Actor("model", engine=READY, num_gpus=2)


def test_options_for_a_vllm_of_ones_own_name_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    options = rl3d.vllm_options()
    module, _, name = options["worker_extension_cls"].rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)
    assert find_spec(options["logits_processors"][0].partition(":")[0]) is not None
