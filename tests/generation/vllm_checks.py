"""What each rank does in test_vllm.py: actors that generate with vLLM, before and after an update."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine import feed
from rl3d.generation.engine import Progress, Request, Result, SamplingParams

NEW_TOKENS = 10
CASES = (("llama", "tp1.pp1.zero1", "tp1"), ("qwen2", "tp2.pp1.zero1", "tp2"), ("qwen3", "tp1.pp2.zero1", "tp2"))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0}, "cool": {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
    "greedy": {"temperature": 0.0},
}  # fmt: skip


def prompts() -> torch.Tensor:
    """Ragged prompts, left-padded with 0; the last two begin alike for more than a block of vLLM's cache."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.zeros(6, 48, dtype=torch.int64)
    for row, length in zip(rows, (3, 9, 5, 12, 48, 48), strict=True):
        row[48 - length :] = torch.randint(3, 250, (length,), generator=generator)
    rows[5, :40] = rows[4, :40]
    return rows


def main(runtime: Any, directory: str, only: str) -> dict[str, Any]:
    root = Path(directory)
    feed.BUCKET_BYTES = 100_000
    family, train, gen = next(case for case in CASES if case[0] == only)
    config = PPOConfig(batch_size=8, mini_batch_size=4, lr=3e-3, kl_coef=0.0)
    vllm, ours = (
        Actor(root / family, train=train, gen=gen, engine=engine, algorithm=config, seed=11, max_sequence_length=96,
              max_sequences=4)
        for engine in ("vllm", "megatron")
    )  # fmt: skip
    rounds, mask = [], (prompts() != 0).long()  # the model's pad token is another
    for index in range(3):
        found: dict[str, Any] = {}
        for name, sampling in SETTINGS.items():
            for actor, engine in ((vllm, "vllm"), (ours, "ours")):
                out = actor.rollout(prompts(), mask, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **sampling)
                found[f"{name}/{engine}"] = [out.sequences.tolist(), out.logprobs.tolist()]
                if name == "cool" and engine == "vllm":
                    batch = out
        for actor in (vllm, ours):
            actor.update(batch.sequences, torch.arange(6.0), batch.logprobs, response_mask=batch.response_mask,
                         attention_mask=torch.cat([mask, batch.response_mask.long()], 1), temperature=0.7)  # fmt: skip
        place = root / f"{family}-{index + 1}"
        vllm.save_hf(place)
        rounds.append(found)
    return {"rounds": rounds, "requests": _requests(runtime, vllm, ours)}


def _requests(runtime: Any, *actors: Actor) -> dict[str, Any]:
    """Lengths, stop tokens, samples and aborts by request, of both engines."""
    stop = tuple(range(3, 60))
    requests = [
        Request([5, 17, 101, 2, 9], SamplingParams(0), (7, 0, 0), "none"),
        Request([5, 17, 101, 2, 9], SamplingParams(1, n=2), (7, 1, 0), "one"),
        Request([5, 17, 101], SamplingParams(30, stop_token_ids=stop), (7, 2, 0), "stop"),
        Request([8], SamplingParams(12, temperature=0.6, min_p=0.05), (7, 3, 0), "last"),
    ]
    out: dict[str, Any] = {}
    for actor, name in zip(actors, ("vllm", "ours"), strict=True):
        actor.switch_to_generation()
        order: list[str] = []
        results = actor.sample(requests, lambda result, order=order: order.append(result.request_id))  # type: ignore[misc]
        out[name] = [_plain(r) for r in results]
        out[f"{name} order"] = order
        generator: Any = actor.hybrid.generator

        def cut(progress: Progress, generator: Any = generator) -> None:
            if runtime.rank == 0 and progress.tokens >= 4:
                generator.abort("cut")

        pair = [Request([3, 4 + i], SamplingParams(40), (0, i, 0), n) for i, n in enumerate(("cut", "keep"))]
        out[f"{name} aborted"] = [_plain(r) for r in actor.sample(pair, on_step=cut)]
        actor.switch_to_training()
    told: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(told, out["vllm"] if actors[0].settings.gen.tp == runtime.world_size else 0)
    assert all(other == told[0] for other in told)
    return out


def _plain(result: Result) -> dict[str, Any]:
    return {
        "id": result.request_id, "sample": result.sample_index, "tokens": result.token_ids, "reason": result.finish_reason,
        "logprobs": [result.logprobs, result.sampled_logprobs, result.plain_logprobs],
    }  # fmt: skip
