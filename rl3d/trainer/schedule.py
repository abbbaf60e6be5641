"""Learning rate by optimiser step."""

import math

from rl3d.config import PPOConfig


def learning_rate(config: PPOConfig, step: int, total: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of ``total``: linear warm-up, then constant, linear or cosine.

    The decay runs from the end of the warm-up to ``total`` and ends at ``min_lr_ratio * lr``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    span = max(total - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    shape = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
