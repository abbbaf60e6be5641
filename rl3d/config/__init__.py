"""The typed configuration: read it, resolve it, refuse what cannot run. Never imports torch."""

from rl3d.config.algorithm import PPOConfig, zero_stage_from_fsdp
from rl3d.config.base import ConfigError, Problem
from rl3d.config.keys import KeyInfo, explain
from rl3d.config.machine import count_gpus, resolve
from rl3d.config.run import RunConfig, load_config, passthrough_problems
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
from rl3d.config.validity import MODELS_DIR, check, check_model, model_dir, random_config, read_hf_config, zero_problem

__all__ = [
    "MODELS_DIR",
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
    "passthrough_problems",
    "model_dir",
    "random_config",
    "read_hf_config",
    "resolve",
    "zero_problem",
    "zero_stage_from_fsdp",
]
