"""What each rank does in test_fed.py: actors whose engine has a model of its own, before and after an update."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine import feed
from rl3d.layout import LayoutError
from tests.engine.actor_checks import NEW_TOKENS, prompts

LAYOUTS: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("tp2.pp1.zero1", True, {}), ("tp1.pp2.zero1", False, {}), ("tp1.pp1.zero3", True, {"offload": "params"}),
)  # fmt: skip


def main(runtime: Any, directory: str, out: str) -> dict[str, Any]:
    root = Path(directory)
    feed.BUCKET_BYTES = 100_000  # several buckets for a model of 700 kB
    found = [_actor(runtime, root, Path(out), *layout) for layout in LAYOUTS]
    return {"actors": found, "refused": _refused(root / "tied"), "broken": _broken(runtime, root / "tied")}


def _actor(runtime: Any, root: Path, out: Path, train: str, tied: bool, memory: dict[str, Any]) -> dict[str, Any]:
    """Rollouts of both engines from the same trained weights, which are saved for transformers to read."""
    config = PPOConfig(batch_size=8, mini_batch_size=4, lr=3e-3, kl_coef=0.0)
    actors = [
        Actor(root / ("tied" if tied else "untied"), train=train, engine=engine, algorithm=config, seed=11, **memory)
        for engine in ("hf", "megatron")
    ]
    fed, ours = actors
    widest: list[int] = []
    load = fed.hybrid.side.generator.load_weights  # type: ignore[union-attr]

    def watched(tensors: Any) -> None:
        def seen() -> Any:
            for name, value in tensors:
                widest.append(value.untyped_storage().nbytes())
                yield name, value

        load(seen())

    fed.hybrid.side.feed.load = watched  # type: ignore[union-attr]
    before = fed.rollout(prompts(), max_new_tokens=NEW_TOKENS, temperature=0.8, stop_token_ids=[])
    ours.rollout(prompts(), max_new_tokens=NEW_TOKENS, temperature=0.8, stop_token_ids=[])
    for actor in actors:
        actor.update(before.sequences, torch.arange(6.0), before.logprobs, response_mask=before.response_mask,
                     temperature=0.8)  # fmt: skip
    sampled = [
        a.rollout(prompts(), max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, stop_token_ids=[]) for a in actors
    ]  # before the next call: the number of the call is part of the noise
    report = fed.switch_to_generation()
    greedy = fed.generate(prompts(), max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=[])
    fed.switch_to_training()
    place = out / f"{train}-{tied}"
    fed.save_hf(place)
    received = torch.tensor([report.bytes_received, report.bytes_local])
    dist.all_reduce(received)
    return {
        "train": train, "weights": str(place), "greedy": greedy.tolist(), "before": before.sequences.tolist(),
        "sampled": [s.sequences.tolist() for s in sampled], "logprobs": [s.logprobs.tolist() for s in sampled],
        "moved": received.tolist(), "buckets": len(fed.hybrid.side.feed.buckets),  # type: ignore[union-attr]
        "widest": max(widest),
        "model": sum(s.numel // s.shape[0] * (s.valid_rows or s.shape[0]) * 4 for s in fed.hybrid.specs),
    }  # fmt: skip


def _refused(directory: Path) -> dict[str, str]:
    def error(kind: type[Exception], **options: Any) -> str:
        try:
            Actor(directory, engine="hf", **options)
        except kind as problem:
            return str(problem)
        return ""

    return {
        "tp": error(LayoutError, gen="tp2"), "verify": error(ValueError, verify=True),
        "drop": error(ValueError, training_copy="drop"),
    }  # fmt: skip


def _broken(runtime: Any, directory: Path) -> dict[str, Any]:
    """A loader that fails on one rank half-way: an error there, nobody is left waiting, and the next switch is good."""
    actor = Actor(directory, train="tp2.pp1.zero1", engine="hf")
    mover = actor.hybrid.side.feed
    load = mover.load  # type: ignore[union-attr]

    def fail(tensors: Any) -> None:
        next(tensors)
        raise MemoryError("no room for the second tensor")

    if runtime.rank == 1:
        mover.load = fail  # type: ignore[union-attr]
    try:
        actor.switch_to_generation()
        first = ""
    except Exception as problem:
        first = str(problem)
    mode = actor.is_training_mode
    mover.load = load  # type: ignore[union-attr]
    out = actor.rollout(prompts(), max_new_tokens=2)
    told: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(told, (first, mode))
    return {"told": told, "after": list(out.sequences.shape)}
