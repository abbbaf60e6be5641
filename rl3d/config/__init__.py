"""The typed configuration: read it, resolve it, refuse what cannot run. Never imports torch."""

from rl3d.config.algorithm import PPOConfig, zero_stage_from_fsdp
from rl3d.config.base import ConfigError, Problem
from rl3d.config.check import check, check_model, count_gpus, model_dir, read_hf_config, resolve
from rl3d.config.explain import KeyInfo, explain
from rl3d.config.run import RunConfig, load_config
from rl3d.config.sections import (
    DataConfig,
    DataSource,
    LayoutChoice,
    LayoutConfig,
    ModelConfig,
    RandomModel,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    TrainerConfig,
)

__all__ = [
    "ConfigError",
    "DataConfig",
    "DataSource",
    "KeyInfo",
    "LayoutChoice",
    "LayoutConfig",
    "ModelConfig",
    "PPOConfig",
    "Problem",
    "RandomModel",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "check",
    "check_model",
    "count_gpus",
    "explain",
    "load_config",
    "model_dir",
    "read_hf_config",
    "resolve",
    "zero_stage_from_fsdp",
]
