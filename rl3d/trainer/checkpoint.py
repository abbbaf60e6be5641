"""Checkpoints of a run: weights, optimiser, scheduler, random state and position in the data.

Every rank writes what it holds in the run's layout; a run of any other layout or number of ranks reads from them what it
needs (:mod:`rl3d.engine.carry`).

A checkpoint is written under a temporary name, flushed to disk, and renamed once every rank has written its part; only
then does the ``latest`` file name it. A run that is killed at any moment resumes from the last complete one.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl3d.distributed.bootstrap import Runtime
from rl3d.engine.carry import CarryError, carry_over, training_state
from rl3d.engine.training import TrainingEngine

LATEST = "latest"
STATE = "state.json"
WEIGHTS = "hf"
CRITIC = "critic"


class ResumeError(RuntimeError):
    """A checkpoint that this run cannot continue from; the message says what differs."""


@dataclass
class RunState:
    """Where a run stands, the same on every rank.

    Attributes:
        step: training steps done; the next one has this number.
        optimizer_steps: optimiser steps taken (the learning-rate schedule's clock).
        stream: position in the data.
        layout: training layout, e.g. ``"tp2.pp2.dp1.zero1"``, with the mesh order behind a slash.
        world_size: ranks.
        critic_steps: optimiser steps that the critic took.
    """

    step: int
    optimizer_steps: int
    stream: dict[str, Any]
    layout: str
    world_size: int
    critic_steps: int = 0


def save(directory: Path, state: RunState, engines: Mapping[str, TrainingEngine], runtime: Runtime, keep: int,
         export: Callable[[Path], None]) -> Path:  # fmt: skip
    """Write ``directory/step_N``; the ``keep`` newest stay. Collective. Returns its path.

    ``engines`` is what learns, by name. ``export`` writes weights as Hugging Face directories into the checkpoint, so
    that each can be used on its own.
    """
    final = directory / f"step_{state.step:06d}"
    partial = directory / f".step_{state.step:06d}.partial"
    if runtime.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    runtime.barrier()
    content = {
        **{name: training_state(engine) for name, engine in engines.items()},
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(runtime.device) if runtime.device.type == "cuda" else None,
        "python_rng": random.getstate(),
    }
    export(partial)
    path = partial / f"rank_{runtime.rank:05d}.pt"
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    runtime.barrier()
    if runtime.rank == 0:
        _write(partial / STATE, json.dumps(asdict(state), indent=2))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _write(directory / LATEST, final.name)
        for old in complete(directory)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    runtime.barrier()
    return final


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step_*") if (p / STATE).is_file())


def find(directory: Path, resume: str) -> Path | None:
    """Checkpoint to resume from: ``auto`` the newest complete one if any, ``never`` none, otherwise that directory.

    Raises:
        ResumeError: a directory was named and is not a complete checkpoint (nor a run with one).
    """
    if resume == "never":
        return None
    if resume == "auto":
        return next(reversed(complete(directory)), None)
    named = Path(resume)
    if (named / STATE).is_file():
        return named
    inside = complete(named / "checkpoints") or complete(named)
    if not inside:
        raise ResumeError(f"trainer.resume: {named} holds no complete checkpoint; expected a step_N directory or a run")
    return inside[-1]


def load(path: Path, engines: Mapping[str, TrainingEngine], runtime: Runtime, layout: str) -> RunState:
    """Restore weights, optimiser and random state; in another layout than the one saved, each rank takes its elements of
    weights and optimiser from all parts. Collective.

    Raises:
        ResumeError: another critic or model, or a part is missing.
    """
    state = RunState(**json.loads((path / STATE).read_text()))
    same = (state.layout, state.world_size) == (layout, runtime.world_size)
    mine = _part(path, runtime.rank % state.world_size)
    if ("critic" in mine) != ("critic" in engines):
        here, there = ("trains a critic", "holds none") if "critic" in engines else ("trains no critic", "holds one")
        raise ResumeError(
            f"this run {here}, and {path} {there}; resume with the algorithm settings it was written with, or start anew "
            f"with model.path = {path / WEIGHTS}"
        )
    if same:
        for name, engine in engines.items():
            engine.zero.load_state_dict(mine[name])
    else:
        parts = [_part(path, rank) for rank in range(state.world_size)]
        try:
            for name, engine in engines.items():
                carry_over(engine, [part[name] for part in parts], runtime)
        except CarryError as error:
            raise ResumeError(
                f"{path} was written by {state.world_size} ranks at {state.layout}, this run has {runtime.world_size} at "
                f"{layout}, and cannot take over its state: {error}"
            ) from None
    torch.set_rng_state(mine["torch_rng"])
    if mine["cuda_rng"] is not None and runtime.device.type == "cuda":
        torch.cuda.set_rng_state(mine["cuda_rng"], runtime.device)
    random.setstate(mine["python_rng"])
    return state


def _part(path: Path, rank: int) -> dict[str, Any]:
    """What a rank wrote; tensors stay in the file until they are used."""
    part = path / f"rank_{rank:05d}.pt"
    if not part.is_file():
        raise ResumeError(f"{part} is missing; every rank needs to see the run's directory (a shared file system)")
    return torch.load(part, map_location="cpu", weights_only=True, mmap=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
