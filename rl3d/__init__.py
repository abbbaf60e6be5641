"""rl3d: reinforcement-learning post-training of language models on Megatron-core and DeepSpeed."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("rl3d")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0+checkout"

# Imported on first use: `import rl3d` and `rl3d --help` must not pay for torch.
_LAZY = {
    "Actor": "rl3d.engine.actor",
    "Critic": "rl3d.engine.critic",
    "RLTrainer": "rl3d.trainer.trainer",
    "RewardModel": "rl3d.engine.reward_model",
    "VLLMActor": "rl3d.engine.vllm_actor",
    "vllm_options": "rl3d.generation.vllm_ready",
    "PPOConfig": "rl3d.config",
    "RolloutConfig": "rl3d.config",
    "RunConfig": "rl3d.config",
    "TrainerConfig": "rl3d.config",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rl3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
