"""From scores to advantages on packed rows, over the whole batch of a step before it is cut into mini-batches.

Shape legend: N response tokens of this rank's rows, end to end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl3d.algorithms.advantages import packed_gae, whiten
from rl3d.algorithms.losses import kl_penalty
from rl3d.config import PPOConfig
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.tally import Tally


def estimate_advantages(rows: Sequence[MicroBatch], config: PPOConfig, tally: Tally) -> dict[str, float]:
    """Put ``advantages`` and ``returns`` into each row's values. Collective over all ranks of the layout.

    - ``grpo``: advantages are the samples' own; with ``kl_in=reward`` each token pays for its KL.
    - ``ppo`` with ``values`` in the rows: rewards per token are the score on the last token minus ``kl_coef`` times
      the KL of each token (verl's ``apply_kl_penalty``); GAE over each response (arXiv:1506.02438), then whitened over
      all response tokens of the batch (verl's ``compute_gae_advantage_return``). Returns are not whitened.
    - ``ppo`` without values: discounted sums of the same rewards in place of GAE, whitened likewise. That is
      REINFORCE++ (arXiv:2501.03262; verl's ``compute_reinforce_plus_plus_outcome_advantage``).

    Returns:
        metrics ``critic/advantages``, ``critic/returns``, ``critic/rewards`` and, with values, ``critic/values``, each
        mean, max and min; with values ``critic/vf_explained_var``, 1 - Var(returns - values) / Var(returns).
    """
    mask = _joined(rows, "mask").bool()
    cost = _kl_cost(rows, config, mask)
    rewards = torch.where(mask, _joined(rows, "scores"), 0.0) - cost
    counts = [n for row in rows for n in row.counts]
    known = tally.on_last_stage and config.name == "ppo" and all("values" in row.values for row in rows)
    values = _joined(rows, "values") if known else None
    if config.name == "ppo":
        raw, returns = packed_gae(rewards, values, mask, counts, gamma=config.gamma, lam=config.lam)
        advantages = whiten(raw, mask, moments=tally.moments(raw, mask))
    else:
        advantages = returns = torch.where(mask, _joined(rows, "advantages") - cost, 0.0)
    for name, every in (("advantages", advantages), ("returns", returns)):
        for row, part in zip(rows, every.split([len(row.select_N) for row in rows]), strict=True):
            row.values[name] = part
    out = tally.spread("critic/advantages", advantages, mask) | tally.spread("critic/returns", returns, mask)
    sums = torch.stack([part.sum() for part in rewards.split(counts)]) if counts else rewards
    some = torch.stack([part.any() for part in mask.split(counts)]) if counts else mask
    out |= tally.spread("critic/rewards", sums, some)
    if tally.anywhere(values is not None):
        values = torch.zeros_like(returns) if values is None else values
        out |= tally.spread("critic/values", values, mask)
        total, rest = tally.moments(returns, mask), tally.moments(returns - values, mask)
        out["critic/vf_explained_var"] = 1.0 - float(rest.variance) / (float(total.variance) + 1e-5)  # verl's 1e-5
    return out


def _joined(rows: Sequence[MicroBatch], name: str) -> Tensor:
    return torch.cat([row.values[name] for row in rows])


def _kl_cost(rows: Sequence[MicroBatch], config: PPOConfig, mask: Tensor) -> Tensor:
    """What each response token pays for its KL to the reference [N]; 0 outside the mask."""
    if config.kl_in != "reward" or not all("ref_logprobs" in row.values for row in rows):
        return torch.zeros(mask.shape, device=mask.device)
    old, ref = _joined(rows, "old_logprobs"), _joined(rows, "ref_logprobs")
    return config.kl_coef * kl_penalty(old, ref, mask, config.kl_estimator)
