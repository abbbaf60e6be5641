"""From a resolved run configuration to what the memory plan asks for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl3d.config import RunConfig
from rl3d.config.engines import VLLM_CPU_CACHE, VLLM_SHARE
from rl3d.estimate.memory import MemoryPlan, predict
from rl3d.estimate.settings import MemorySettings
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture


@dataclass(frozen=True)
class Request:
    """Model, layouts and settings of one plan, and how many ranks there are."""

    arch: Architecture
    train: TrainLayout
    gen: GenLayout
    settings: MemorySettings
    world: int

    @classmethod
    def of(cls, cfg: RunConfig, hf_config: Mapping[str, Any], device_bytes: int | None = None) -> "Request":
        """What a resolved configuration asks for, on devices of so many bytes, if that is known.

        Raises :class:`~rl3d.models.UnsupportedModelError`.
        """
        assert isinstance(cfg.layout.ranks, int)
        hf_config = dict(hf_config)
        if cfg.model.random is not None:
            hf_config.setdefault("vocab_size", 512)  # the tokenizer's, of tiny models
        train = cfg.layout.train_layout.resolve(cfg.layout.ranks)
        return cls(
            Architecture.from_hf(hf_config), train, cfg.layout.gen_layout, _settings(cfg, device_bytes), cfg.layout.ranks
        )

    def plan(self) -> MemoryPlan:
        """See :func:`predict`."""
        return predict(self.arch, self.train, self.gen, self.settings)


def _settings(cfg: RunConfig, device_bytes: int | None) -> MemorySettings:
    layout, algorithm, rollout = cfg.layout, cfg.algorithm, cfg.rollout
    zero = cfg.deepspeed.get("zero_optimization", {})
    length = cfg.model.max_sequence_length
    assert length is not None and cfg.model.dtype != "auto" and layout.device != "auto"
    return MemorySettings(
        dtype=cfg.model.dtype,
        device=layout.device,
        max_sequence_length=length,
        responses=algorithm.mini_batch_size * rollout.n,
        micro_batch_tokens=algorithm.micro_batch_tokens,
        logprob_chunk_tokens=algorithm.logprob_chunk_tokens,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
        offload=layout.offload,
        training_copy=layout.training_copy,
        gradients=layout.gradients,
        optimizer_state=layout.optimizer_state,
        alias=layout.alias == "auto" and not layout.defer_gather and rollout.engine == "megatron",
        reference=algorithm.reference_residency if algorithm.needs_reference else "none",
        critic=algorithm.critic_residency if algorithm.use_critic else "none",
        critic_learns=not algorithm.freeze_critic,
        critic_arch=_critic(cfg),
        max_sequences=rollout.max_sequences,
        step_prompts=algorithm.batch_size if rollout.cache_strategy != "full" else None,
        samples=rollout.n,
        max_prefill_tokens=rollout.max_batch_tokens,
        staging_bytes=layout.staging_mib << 20,
        engine=rollout.engine,
        vllm_share=float(rollout.vllm.get("gpu_memory_utilization", VLLM_SHARE)),
        vllm_cache=_vllm_cache(cfg),
        vllm_sleeps=bool(rollout.vllm.get("enable_sleep_mode", True)),
        device_bytes=device_bytes,
        bucket=int(zero.get("reduce_bucket_size", MemorySettings.bucket)),
        flash=cfg.model.attention == "auto",
        grouped_varlen=_torch_version() >= (2, 14),
    )


def _vllm_cache(cfg: RunConfig) -> int | None:
    """Bytes of vLLM's cache, where a setting says them; on a CPU one always does."""
    told = cfg.rollout.vllm.get("kv_cache_memory_bytes")
    if told is None and cfg.layout.device == "cpu":
        return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", VLLM_CPU_CACHE)) << 30
    return None if told is None else int(told)


def _critic(cfg: RunConfig) -> Architecture | None:
    """The critic's own shape, where its directory says it; None: the policy's."""
    path = cfg.algorithm.critic_model
    if not cfg.algorithm.use_critic or path is None or not (Path(path).expanduser() / "config.json").is_file():
        return None
    return Architecture.from_hf(Path(path).expanduser())


def _torch_version() -> tuple[int, int]:
    try:
        major, minor = version("torch").split(".")[:2]
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return (0, 0)
