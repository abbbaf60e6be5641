"""Names of the metrics, and small summaries. The names are verl's, so that dashboards can be shared."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# seconds, by phase of a step
TIMING_GEN = "timing_s/gen"
TIMING_REWARD = "timing_s/reward"
TIMING_OLD_LOG_PROB = "timing_s/old_log_prob"
TIMING_REF = "timing_s/ref"
TIMING_VALUES = "timing_s/values"
TIMING_ADV = "timing_s/adv"
TIMING_UPDATE_CRITIC = "timing_s/update_critic"
TIMING_UPDATE_ACTOR = "timing_s/update_actor"
TIMING_UPDATE_WEIGHTS = "timing_s/update_weights"
TIMING_EXCHANGE = "timing_s/exchange"
TIMING_ROWS = "timing_s/rows"
TIMING_STEP = "timing_s/step"
# the update
ACTOR_PG_LOSS = "actor/pg_loss"
ACTOR_ENTROPY = "actor/entropy"
ACTOR_KL_LOSS = "actor/kl_loss"
ACTOR_PPO_KL = "actor/ppo_kl"
ACTOR_PG_CLIPFRAC = "actor/pg_clipfrac"
ACTOR_GRAD_NORM = "actor/grad_norm"
ACTOR_LR = "actor/lr"
# prefixes of mean, max and min
SCORE = "critic/score"
REWARDS = "critic/rewards"
ADVANTAGES = "critic/advantages"
RETURNS = "critic/returns"
RESPONSE_LENGTH = "response_length"
PROMPT_LENGTH = "prompt_length"
# the machine
THROUGHPUT = "perf/throughput"  # tokens per second and rank
TOTAL_TOKENS = "perf/total_num_tokens"
TIME_PER_STEP = "perf/time_per_step"
MFU_ACTOR = "perf/mfu/actor"  # of the policy update, where the device's peak is known
MAX_MEMORY_GB = "perf/max_memory_allocated_gb"
# generation against training: probabilities of the sampled tokens
PROBS_DIFF_MAX = "training/rollout_probs_diff_max"
PROBS_DIFF_MEAN = "training/rollout_probs_diff_mean"
PROBS_DIFF_STD = "training/rollout_probs_diff_std"
GLOBAL_STEP = "training/global_step"
EPOCH = "training/epoch"


def spread(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """``prefix/mean``, ``prefix/max`` and ``prefix/min`` of ``values``; nothing at all when there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    return {
        f"{prefix}/mean": math.fsum(numbers) / len(numbers),
        f"{prefix}/max": max(numbers),
        f"{prefix}/min": min(numbers),
    }


def lengths(prefix: str, tokens: Iterable[int], limit: int) -> dict[str, float]:
    """Spread of lengths in tokens, and ``prefix/clip_ratio``: the share that reached ``limit``."""
    counts = list(tokens)
    if not counts:
        return {}
    return {**spread(prefix, counts), f"{prefix}/clip_ratio": sum(n >= limit for n in counts) / len(counts)}


def plain(value: Any) -> Any:
    """``value`` as Python's own type: 0-d tensors and numpy scalars become numbers."""
    return value.item() if hasattr(value, "item") and not isinstance(value, (str, bytes)) else value


def json_value(value: Any) -> Any:
    """``value`` as something JSON can hold. NaN and infinities, which JSON has not, become the strings of that name."""
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
