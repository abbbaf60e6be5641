"""Learning rate by optimiser step."""

import math

from rl3d.config import PPOConfig


def learning_rate(config: PPOConfig, step: int, total: int, *, critic: bool = False) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of ``total``: linear warm-up, then constant, linear or cosine.

    The decay runs from the end of the warm-up to ``total`` and ends at ``min_lr_ratio * lr``. With ``critic`` the
    critic's peak and warm-up are taken, under the same schedule.
    """
    peak, warmup = (config.critic_lr, config.critic_warmup_steps) if critic else (config.lr, config.warmup_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_schedule == "constant":
        return peak
    span = max(total - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    shape = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
