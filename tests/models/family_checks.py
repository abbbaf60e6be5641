"""Families on two ranks; facts go back to test_families.py."""

from pathlib import Path
from typing import Any

import torch

from rl3d import Actor


def main(runtime: Any, directory: str, families: list[str], length: int) -> dict[str, Any]:
    facts = {}
    prompts = torch.randint(3, 253, (2, length), generator=torch.Generator().manual_seed(2))
    for family in families:
        for train, gen in (("tp2.pp1.zero1", "tp2"), ("tp1.pp2.zero1", "tp1")):
            source = Path(directory) / family
            actor = Actor(source, train=train, gen=gen, verify=True)
            greedy = actor.rollout(prompts, max_new_tokens=24, temperature=0.0, stop_token_ids=[])
            metrics = actor.update(greedy.sequences, torch.tensor([1.0, 0.0]), greedy.logprobs, temperature=1.0)
            before = actor.hybrid.generation_fingerprints()
            actor.switch_to_generation()
            changed = sum(a != b for a, b in zip(before.values(), actor.hybrid.generation_fingerprints().values()))
            actor.switch_to_training()
            fresh = Actor(source, train=train, gen=gen)
            fresh.save_hf(Path(directory) / f"{family}-{train}")
            facts[f"{family}-{train}"] = {
                "sequences": greedy.sequences.tolist(), "logprobs": greedy.logprobs.tolist(), "changed": changed,
                "parameters": len(before), "against_training": metrics["training/rollout_logprobs_diff_max"],
            }  # fmt: skip
    return facts
