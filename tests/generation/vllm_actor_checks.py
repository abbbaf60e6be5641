"""What each rank does in test_vllm_actor.py: actors that train, switch and generate with vLLM, started here or ready."""

import asyncio
import os
from pathlib import Path
from typing import Any

import torch

import rl3d
from rl3d import PPOConfig, VLLMActor
from rl3d.engine.hybrid import ModeError
from rl3d.estimate.rollout import vllm_cache_bytes
from rl3d.estimate.settings import MemorySettings
from rl3d.generation.engine import GenerationError, Progress, Request, SamplingParams
from tests.generation.vllm_checks import NEW_TOKENS, prompts
from tests.ranks import DEVICE

LENGTH = 96
CASES = {
    "tp1": ("tp1.pp1.zero1", 1), "tp2": ("tp1.pp1.zero2", 2), "ready": ("tp1.pp1.zero1", 1),
    "ready tp2": ("tp2.pp1.zero1", 2), "processes": ("tp1.pp1.zero1", 1), "async": ("tp1.pp1.zero1", 1),
}  # fmt: skip
"""Who starts vLLM, and where -> training layout, ranks."""


def main(runtime: Any, directory: str, case: str) -> dict[str, Any]:
    place = Path(directory)
    train, ranks = CASES[case]
    llm = None if case.startswith("tp") else _ready(place, case, ranks)
    given = {"tensor_parallel_size": ranks} if llm is None else {"llm": llm}
    config = PPOConfig(batch_size=8, mini_batch_size=4, lr=3e-3, kl_coef=0.0)
    refused = _refused(place, llm) if case == "ready" else {}
    actor = VLLMActor(place, train=train, algorithm=config, max_sequence_length=LENGTH, max_sequences=4, **given)
    assert llm is None or actor.llm is llm
    mask, rounds = (prompts() != 0).long(), []
    for index in range(3):
        to_generation = actor.switch_to_generation()
        greedy = actor.generate(prompts(), mask, NEW_TOKENS, temperature=0.0, stop_token_ids=[])
        to_training = actor.switch_to_training()
        sampled = actor.rollout(prompts(), mask, NEW_TOKENS, temperature=0.7, top_p=0.9, stop_token_ids=[])
        where = place if index == 0 else place.with_name(f"{place.name}-{case}-{index}")
        if index:
            actor.save_hf(where)
        rounds.append({
            "weights": str(where), "greedy": greedy.tolist(), "sampled": sampled.sequences.tolist(),
            "logprobs": sampled.logprobs.tolist(), "cache": [to_generation.cache_bytes, to_training.cache_bytes],
        })  # fmt: skip
        actor.update(sampled.sequences, torch.arange(6.0), sampled.logprobs)
    generator: Any = actor.hybrid.side.generator
    found = {"rounds": rounds, "refused": refused, "training": _error(lambda: actor.generate(prompts())),
             "stale": _error(lambda: generator.generate([])), "asleep": generator.link.sleeps()}  # fmt: skip
    if case.startswith("tp") and DEVICE == "cpu":
        found["memory"] = _memory(actor)
    if case == "async":
        found["stopped"] = _stopped(actor)
        found["inside"] = _inside(actor, generator.link)
        llm.shutdown()
    return found


def _memory(actor: VLLMActor) -> list[int]:
    """Bytes of vLLM's cache on this rank, and what the memory plan says; its weights are packed away on a CPU."""
    settings = MemorySettings(dtype="float32", device="cpu", engine="vllm", vllm_cache=1 << 30)
    (cache,) = actor.llm.collective_rpc(lambda worker: sum(t.nbytes for t in worker.model_runner.kv_caches))
    return [cache, vllm_cache_bytes(actor.parts.arch, actor.parts.padded_vocab, actor.settings.gen, settings)]


def _stopped(actor: VLLMActor) -> dict[str, Any]:
    """A request that is aborted by its name among others, and results in the order in which they end."""
    requests = [Request([3, 4 + i], SamplingParams(n), (0, i, 0), name)
                for i, (name, n) in enumerate((("long", 60), ("cut", 60), ("short", 3)))]  # fmt: skip
    actor.switch_to_generation()
    order: list[str] = []

    def cut(progress: Progress) -> None:
        if progress.tokens >= 8:
            actor.hybrid.generator.abort("cut")  # type: ignore[union-attr]

    results = actor.sample(requests, lambda result: order.append(result.request_id), cut)
    actor.switch_to_training()
    return {"order": order, "ends": [[r.request_id, r.finish_reason, len(r.token_ids)] for r in results]}


def _inside(actor: VLLMActor, link: Any) -> str:
    """What is said to a caller that would wait for its own event loop."""

    async def call() -> str:
        return _error(actor.switch_to_generation)

    return asyncio.run_coroutine_threadsafe(call(), link._loop).result()


def _ready(place: Path, case: str, ranks: int) -> Any:
    """vLLM as a user starts it."""
    options = {**rl3d.vllm_options(), "dtype": "float32", "max_model_len": LENGTH, "skip_tokenizer_init": True,
               "enforce_eager": True, "block_size": 32, "max_num_seqs": 4, "tensor_parallel_size": ranks,
               "enable_sleep_mode": DEVICE == "cuda", "gpu_memory_utilization": 0.5}  # fmt: skip
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(case in ("processes", "async")))}  # fmt: skip
    if case == "async":
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(str(place), **options))
    from vllm import LLM

    return LLM(str(place), **options, **({"distributed_executor_backend": "external_launcher"} if ranks > 1 else {}))


def _refused(place: Path, good: Any) -> dict[str, str]:
    """What is said to engines that do not fit, before anything is built on them."""
    from vllm import LLM

    other = LLM(str(place.with_name("other")), dtype="bfloat16", max_model_len=64, skip_tokenizer_init=True,
                enforce_eager=True, block_size=32)  # fmt: skip
    said = {
        "other": _error(lambda: VLLMActor(place, llm=other, max_sequence_length=LENGTH)),
        "options": _error(lambda: VLLMActor(place, llm=good, gpu_memory_utilization=0.5, max_sequence_length=LENGTH)),
        "kind": _error(lambda: VLLMActor(place, llm=object())),
        "sleep": _error(lambda: VLLMActor(place, vllm={"enable_sleep_mode": True})),
        "both": _error(lambda: VLLMActor(place, use_vllm=False)),
        "session": _error(lambda: VLLMActor(place, llm=good, num_gpus=1)),
    }  # fmt: skip
    good.llm_engine.add_request("mine", {"prompt_token_ids": [5, 6]}, _params())
    said["busy"] = _error(lambda: VLLMActor(place, llm=good, max_sequence_length=LENGTH).switch_to_generation())
    good.llm_engine.abort_request(["mine"])
    return said


def _params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=4, detokenize=False)


def _error(call: Any) -> str:
    try:
        call()
    except (GenerationError, ModeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
