"""Generation: noise, sampler, key/value cache, scheduler and the engines.

The interface (:mod:`rl3d.generation.engine`) imports neither torch nor megatron-core; engines load on first use.
"""

from typing import Any

from rl3d.generation.engine import (
    GenerationEngine,
    GenerationError,
    Progress,
    Request,
    Result,
    SamplingParams,
    StaleWeightsError,
)

_LAZY = {
    "HFGenerator": "rl3d.generation.hf",
    "MegatronGenerator": "rl3d.generation.megatron",
    "CachedSelfAttention": "rl3d.generation.attention",
    "VLLMGenerator": "rl3d.generation.vllm",
    "stream": "rl3d.generation.streaming",
}

__all__ = [
    "CachedSelfAttention", "GenerationEngine", "GenerationError", "HFGenerator", "MegatronGenerator", "Progress", "Request",
    "Result", "SamplingParams", "StaleWeightsError", "VLLMGenerator", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
