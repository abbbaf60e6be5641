"""Whether a run's model is one that rl3d computes, found before anything starts."""

from collections.abc import Mapping
from typing import Any

from rl3d.config import ConfigError, Problem, RunConfig
from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError


def refuse_unsupported(cfg: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a model (``model.path``) whose configuration asks for more than is computed here.

    ``hf_config`` is what :func:`rl3d.config.check` returned, which looked at the sizes only. Random weights
    (``model.random``) may leave fields to transformers' defaults and are checked when they are made.
    """
    if cfg.model.path is None:
        return
    try:
        arch = Architecture.from_hf(hf_config)
    except UnsupportedModelError as error:
        raise ConfigError(Problem("model.path", str(error), cfg.model.path)) from None
    longest = cfg.model.max_sequence_length or 0
    if longest > arch.max_positions:
        text = (
            f"longer than the model's sliding_window = {arch.max_positions}, within which its attention is full; windowed "
            f"attention is not computed here. Lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
        raise ConfigError(Problem("model.max_sequence_length", text, longest))
