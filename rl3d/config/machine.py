"""From what was written to what will run on this machine: GPUs counted, every ``auto`` decided. No torch needed."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl3d.config.algorithm import zero_stage_from_fsdp
from rl3d.config.base import ConfigError, Problem
from rl3d.config.run import RunConfig
from rl3d.layout.parallel import LayoutError


def count_gpus() -> int:
    """GPUs that this process may use, found without importing torch; 0 when in doubt."""
    if "torch" in sys.modules:
        try:
            return int(sys.modules["torch"].cuda.device_count())
        except Exception:  # a half-imported or broken torch: fall back to the driver's word
            pass
    elif not _torch_has_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _driver_gpus()
    if visible is None:
        return present
    entries = [entry.strip() for entry in visible.split(",")]
    for index, entry in enumerate(entries):  # CUDA itself stops at the first entry that names nothing
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= present):
            entries = entries[:index]
            break
    return min(len(entries), present) if present else 0


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) is None


def _driver_gpus() -> int:
    if shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
            return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)) if done.returncode == 0 else 0
        except (OSError, subprocess.SubprocessError):
            return 0
    return len([p for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)])


def resolve(cfg: RunConfig, world_size: int | None = None, gpus: int | None = None) -> RunConfig:
    """The configuration with every ``auto`` decided; resolving twice changes nothing.

    ``world_size`` is the number of ranks already started (None: not started yet); ``gpus`` the number of GPUs of
    this machine (None: counted). Raises :class:`ConfigError` when the layouts do not fit the ranks.
    """
    layout = cfg.layout
    if gpus is None:
        gpus = 0 if layout.device == "cpu" else count_gpus()
    if layout.device == "cuda" and gpus == 0:
        raise ConfigError(
            Problem("layout.device", "no usable GPU was found; use auto or cpu, and see `rl3d check-env`", "cuda")
        )
    device = "cuda" if gpus > 0 and layout.device != "cpu" else "cpu"
    usable = 0 if device == "cpu" else (world_size or gpus)  # started ranks have one GPU each
    chosen: dict[str, Any] = {key: getattr(layout, key) for key in ("train", "gen", "order", "ranks")}
    fitting = [count for count in layout.on_gpus if count <= usable]
    if fitting:
        choice = layout.on_gpus[max(fitting)]
        chosen.update({key: value for key in chosen if (value := getattr(choice, key)) is not None})
    chosen["train"] = _with_zero_stage(chosen["train"], cfg.algorithm.fsdp_config)
    parsed = layout.model_copy(update={**chosen, "device": device, "on_gpus": {}})
    world = _world(parsed, world_size, usable)
    train = parsed.train_layout
    problems = []
    try:
        train = train.resolve(world)
    except LayoutError as error:
        problems.append(Problem("layout.train", str(error), parsed.train))
    try:
        parsed.gen_layout.replicas(world)
    except LayoutError as error:
        problems.append(Problem("layout.gen", str(error), parsed.gen))
    if problems:
        raise ConfigError(problems)
    dtype = cfg.model.dtype if cfg.model.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    length = cfg.model.max_sequence_length or cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    seed = cfg.trainer.seed
    final = cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update={"dtype": dtype, "max_sequence_length": length}),
            "layout": parsed.model_copy(update={"train": str(train), "ranks": world}),
            "data": cfg.data.model_copy(update={"seed": seed if cfg.data.seed is None else cfg.data.seed}),
            "rollout": cfg.rollout.model_copy(update={"seed": seed if cfg.rollout.seed is None else cfg.rollout.seed}),
            "reward": cfg.reward.model_copy(update={"function": None, "functions": cfg.reward.terms}),
        }
    )
    return RunConfig(**final.model_dump())


def _with_zero_stage(train: str, fsdp_config: dict[str, Any] | None) -> str:
    stage = zero_stage_from_fsdp(fsdp_config)
    if stage is None:
        return train
    named = re.search(r"zero(\d+)", train)
    if named is None:
        return f"{train}.zero{stage}"
    if int(named[1]) != stage:
        raise ConfigError(
            Problem(
                "algorithm.fsdp_config",
                f"means zero{stage}, but layout.train = {train!r}; remove one of the two",
                fsdp_config,
            )
        )
    return train


def _world(layout: Any, world_size: int | None, gpus: int) -> int:
    if world_size is not None:
        if layout.ranks not in ("auto", world_size):
            raise ConfigError(
                Problem(
                    "layout.ranks",
                    f"{world_size} ranks were started; start {layout.ranks}, or set layout.ranks=auto",
                    layout.ranks,
                )
            )
        return world_size
    if layout.ranks != "auto":
        if gpus and layout.ranks > gpus:
            raise ConfigError(
                Problem(
                    "layout.ranks",
                    f"only {gpus} GPU{'s' if gpus > 1 else ''} on this machine and each rank needs one; lower it, "
                    "start the ranks on several machines with torchrun, deepspeed or srun, or set layout.device=cpu",
                    layout.ranks,
                )
            )
        return layout.ranks
    if gpus:
        return gpus
    train, gen = layout.train_layout, layout.gen_layout
    if train.dp is not None:
        return train.model_parallel * train.dp
    return math.lcm(train.model_parallel, gen.tp)
