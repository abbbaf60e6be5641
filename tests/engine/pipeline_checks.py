"""Uneven and interleaved pipelines on four ranks; facts go back to test_pipelines.py, which asserts on them."""

from pathlib import Path
from typing import Any

import torch

from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry
from rl3d.io import export_hf
from rl3d.models.build import model_chunks
from tests.engine.actor_checks import _generation, _life, _same_as_file
from tests.engine.engines import build_engine
from tests.engine.rank_checks import TEMPERATURE, packed
from tests.reference import sequences


def main(runtime: Any, directory: str, cases: list[dict[str, Any]], actor: str) -> dict[str, Any]:
    bootstrap.init_deepspeed()
    registry, root = GroupRegistry(60), Path(directory)
    return {
        "training": [three_steps(runtime, registry, root, **case) for case in cases],
        "generation": _generation(root / "actor", True, actor, "tp2"),
        "life": _life(root / "actor", True, actor, "tp4", "drop"),
        "file": _same_as_file(root / "actor" / "tied", actor),
    }


def three_steps(runtime: Any, registry: GroupRegistry, root: Path, name: str, model: str, train: str,
                options: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Three optimiser steps over rows of different lengths, as many as it takes and not the same number everywhere."""
    built = build_engine(runtime, registry, root / model, train, model_options=options)
    engine, groups = built.engine, built.groups
    norms, before = [], []
    for step in range(3):
        batch = sequences(step)
        total = sum(int((s.weight != 0).sum()) for s in batch)
        mine = batch[groups.dp_rank :: groups.dp_size]
        micro = [packed(mine[:1]), packed(mine[1:2]), packed(mine[2:])]
        if groups.dp_rank == 0:
            micro = [*micro[:2], packed(mine[2:3]), packed(mine[3:4]), *([packed(mine[4:])] if mine[4:] else [])]

        def loss(logprobs, entropy, row, total=total):
            return -(logprobs * row.values["weight"].to(logprobs.device)).sum() / total, {}

        if step == 0:
            before = [logprobs.tolist() for logprobs, _ in engine.logprobs(micro, TEMPERATURE)]
        norms.append(engine.train_step(micro, loss, TEMPERATURE).grad_norm)
    export_hf(root / "out" / name, built.source, built.arch, built.padded_vocab, engine.weights, groups, torch.float32)
    numbers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in model_chunks(built.model)]
    held: list[Any] = [None] * runtime.world_size
    torch.distributed.all_gather_object(held, (groups.pp_rank, groups.dp_rank, numbers, before), group=runtime.cpu_group)
    return {
        "name": name, "norms": norms, "numbers": {str(stage): n for stage, _, n, _ in held},
        "logprobs": {str(dp): found for stage, dp, _, found in held if stage == groups.pp_size - 1},
    }  # fmt: skip
