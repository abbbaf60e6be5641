"""An actor on every GPU of the job: greedy tokens, captured decoding and verified switches; facts go back to the test."""

from pathlib import Path
from typing import Any

import torch

from rl3d import Actor, PPOConfig
from rl3d.engine.policy import TrainSample
from tests.reference import sequences

PROMPTS = [[5, 17, 40], [9] * 11, [3, 4, 5, 6, 7, 8, 9, 10], [77]]
NEW = 24


def main(runtime: Any, directory: str, pairs: list[list[Any]]) -> list[dict[str, Any]]:
    """Greedy tokens before and after updates, three verified round trips each; ``pairs``: train, gen, options."""
    return [_one(runtime, Path(directory), train, gen, options) for train, gen, options in pairs]


def _one(runtime: Any, root: Path, train: str, gen: str, options: dict[str, Any]) -> dict[str, Any]:
    actor = Actor(root / "untied", train=train, gen=gen, dtype="float32", verify="full", cache_strategy="full",
                  max_sequence_length=128, max_sequences=4, alias="off",
                  algorithm=PPOConfig(batch_size=8, kl_coef=0.0, lr=1e-2, max_grad_norm=0.5), **options)  # fmt: skip
    samples = [TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), (-1.0) ** i)
               for i, s in enumerate(sequences(0))]  # fmt: skip
    tokens, verified, transports = [], [], set()
    for trip in range(3):
        report = actor.switch_to_generation()
        verified.append(report.verified)
        transports.add(report.transport)
        tokens.append(_greedy(actor))
        runner = getattr(actor.hybrid.generator, "runner", None)
        actor.switch_to_training()
        actor.save_hf(root / f"{train}-{gen}-{trip}")
        actor.learn(samples, [range(len(samples))], 1.0, lambda: 1e-2)
    found = {"tokens": tokens, "verified": verified, "transports": sorted(transports),
             "graphs": 0 if runner is None else runner.captured}  # fmt: skip
    actor.close()
    return found


def _greedy(actor: Actor) -> list[list[int]]:
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    out = actor.generate(ids, mask, max_new_tokens=NEW, temperature=0.0, stop_token_ids=[])
    return out[:, width:].tolist()
