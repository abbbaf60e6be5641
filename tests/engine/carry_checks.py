"""Training state read into other layouts: facts of four ranks for test_actor.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine.carry import CarryError, carry_over, training_state
from rl3d.engine.policy import TrainSample
from rl3d.reshard.fingerprint import compare
from tests.reference import sequences

MOVES = (
    (True, "tp2.pp2.zero1", "tp1.pp1.zero3", "float32", "none"),
    (True, "tp1.pp1.zero3", "tp1.pp4.zero1", "float32", "none"),
    (False, "tp4.pp1.zero0", "tp2.pp2.vpp2.zero0", "float32", "none"),
    (False, "tp2.pp2.vpp2.zero0", "tp2.pp1.zero2", "float32", "optimizer"),
    (True, "tp1.pp2.zero1", "tp4.pp1.zero1", "bfloat16", "none"),
    (False, "tp4.pp1.zero1", "tp2.pp1.zero3", "bfloat16", "none"),
)


def every(runtime: Any, directory: str) -> list[dict[str, Any]]:
    """All moves."""
    return main(Path(directory), MOVES)


def main(root: Path, moves: Sequence[tuple[bool, str, str, str, str]] = MOVES[:1] + MOVES[4:5]) -> list[dict[str, Any]]:
    """Three updates in one layout, against two there and the third in another that took its state over."""
    config = PPOConfig(batch_size=8, kl_coef=0.0, lr=1e-3)
    samples = [TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), (-1.0) ** i)
               for i, s in enumerate(sequences(0))]  # fmt: skip
    facts = []
    for tied, before, after, dtype, offload in moves:
        directory = root / ("tied" if tied else "untied")
        through = Actor(directory, train=before, gen="tp2", algorithm=config, dtype=dtype)
        moved = Actor(directory, train=after, gen="tp2", algorithm=config, dtype=dtype, offload=offload)
        for _ in range(2):
            through.learn(samples, [range(8)], 1.0, lambda: 1e-3)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, training_state(through.parts.train))
        carry_over(moved.parts.train, parts, moved.runtime)
        equal = compare(through.hybrid.training_fingerprints(), moved.hybrid.training_fingerprints())
        for actor in (through, moved):
            actor.learn(samples, [range(8)], 1.0, lambda: 1e-3)
        facts.append({"move": f"{before} -> {after} {dtype}", "equal": equal, "distance": _distance(root, through, moved),
                      "errors": _errors(moved, parts)})  # fmt: skip
    return facts


def _distance(root: Path, *actors: Actor) -> float:
    """Largest difference of the exported weights over the largest change that a step of Adam makes, the learning rate."""
    from safetensors.torch import load_file

    found = []
    for index, actor in enumerate(actors):
        actor.save_hf(root / f"carried{index}")
        found.append(
            {n: t.float() for f in (root / f"carried{index}").glob("*.safetensors") for n, t in load_file(f).items()}
        )
        dist.barrier()
    return max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) / 1e-3


def _errors(actor: Actor, parts: list[dict[str, Any]]) -> list[str]:
    """Without one parameter of the last rank, which not all ranks need; and with the state of another model."""
    gone = parts[-1]["spans"][0][0][0]
    less = [{**part, "spans": [[s for s in group if s[0] != gone] for group in part["spans"]]} for part in parts]
    errors = []
    for broken in (less, [{**part, "model": "another"} for part in parts]):
        try:
            carry_over(actor.parts.train, broken, actor.runtime)
        except CarryError as error:
            errors.append(str(error))
    return errors
