"""Advantages: group-relative (GRPO), generalised advantage estimation, and whitening."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def grpo_advantages(
    scores_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor | None = None,
    *,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300): (score - group mean) / (group std + eps).

    The standard deviation is the unbiased one, as in verl and TRL. ``normalize_by_std=False`` leaves the division out
    (Dr. GRPO, arXiv:2503.20783). Groups may have any sizes and their members any order.

    ``valid_N`` (bool) is False for failed or rejected samples, and a score that is not finite counts as invalid too:
    such samples take no part in the group's mean and std and get advantage 0. A group with fewer than two valid
    samples has nothing to be compared with: its advantages are 0 (verl returns the raw score there, mean 0 and std 1,
    which turns a lone sample into plain REINFORCE without a baseline).

    The arithmetic is done in float64 so that a group of equal scores gives exactly 0 rather than rounding noise divided
    by ``eps``. Returns [N] in the dtype of ``scores_N`` (float32 for integer scores).
    Raises ``ValueError`` when the inputs disagree in shape.
    """
    if scores_N.shape != group_ids_N.shape or scores_N.dim() != 1:
        raise ValueError(
            f"scores {tuple(scores_N.shape)} and group ids {tuple(group_ids_N.shape)} must both be [N]: one per sample"
        )
    if valid_N is None:
        valid_N = torch.ones_like(scores_N, dtype=torch.bool)
    if valid_N.shape != scores_N.shape:
        raise ValueError(f"valid {tuple(valid_N.shape)} must have the shape of scores, {tuple(scores_N.shape)}")
    out_dtype = scores_N.dtype if scores_N.is_floating_point() else torch.float32
    valid_N = valid_N.bool() & torch.isfinite(scores_N)
    safe_N = torch.where(valid_N, scores_N.double(), 0.0)
    groups, slot_N = torch.unique(group_ids_N, return_inverse=True)

    def group_sum(values_N: Tensor) -> Tensor:
        zeros_G = torch.zeros(len(groups), dtype=torch.float64, device=scores_N.device)
        return zeros_G.index_add(0, slot_N, values_N)

    count_G = group_sum(valid_N.double())
    mean_G = group_sum(safe_N) / count_G.clamp(min=1)
    centred_N = torch.where(valid_N & (count_G[slot_N] >= 2), safe_N - mean_G[slot_N], 0.0)
    if normalize_by_std:
        std_G = (group_sum(centred_N.square()) / (count_G - 1).clamp(min=1)).sqrt()
        centred_N = centred_N / (std_G[slot_N] + eps)
    return centred_N.to(out_dtype)


def gae_advantages(
    rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) over right-padded responses.

    The value of a masked position never serves as a bootstrap, whatever it holds (NaN included): the recursion skips
    such positions. ``values_NT[n, t]`` is the value of the state in which token t was chosen.

    Returns ``(advantages, returns)``, both [N, T] float32 and 0 outside the mask; not whitened.
    """
    if not rewards_NT.shape == values_NT.shape == mask_NT.shape:
        raise ValueError(
            f"rewards {tuple(rewards_NT.shape)}, values {tuple(values_NT.shape)} and mask {tuple(mask_NT.shape)} "
            "must have one shape [N, T]"
        )
    mask_NT = mask_NT.bool()
    rewards_NT = torch.where(mask_NT, rewards_NT.float(), 0.0)
    values_NT = torch.where(mask_NT, values_NT.float(), 0.0)
    advantages_NT = torch.zeros_like(values_NT)
    next_value_N = torch.zeros_like(values_NT[:, 0]) if values_NT.shape[1] else values_NT.new_zeros(len(values_NT))
    running_N = torch.zeros_like(next_value_N)
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        running_N = torch.where(mask_NT[:, t], delta_N + gamma * lam * running_N, running_N)
        next_value_N = torch.where(mask_NT[:, t], values_NT[:, t], next_value_N)
        advantages_NT[:, t] = running_N
    advantages_NT = torch.where(mask_NT, advantages_NT, 0.0)
    return advantages_NT, torch.where(mask_NT, advantages_NT + values_NT, 0.0)


def packed_gae(
    rewards_N: Tensor,
    values_N: Tensor | None,
    mask_N: Tensor,
    counts: Sequence[int],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """:func:`gae_advantages` over responses laid end to end: the first ``counts[0]`` entries are one response, and so on.

    Without values (``None``) both results are the discounted sum of the rewards that follow, the returns of
    REINFORCE++ (arXiv:2501.03262): GAE with a value of 0 everywhere and lambda 1.

    Returns ``(advantages, returns)``, both [N] float32 on the inputs' device and 0 outside the mask.
    Raises ``ValueError`` when the counts do not add up to N.
    """
    if sum(counts) != len(rewards_N):
        raise ValueError(f"{len(rewards_N)} rewards for responses of {list(counts)} tokens, {sum(counts)} in all")
    if not len(rewards_N):
        return rewards_N.float(), rewards_N.float()
    if values_N is None:
        values_N, lam = torch.zeros_like(rewards_N), 1.0
    # the recursion is thousands of small steps: on the host, all responses at once
    rows = [pad_sequence(list(x.cpu().split(list(counts))), batch_first=True) for x in (rewards_N, values_N, mask_N)]
    inside = torch.arange(rows[0].shape[1]) < torch.tensor(list(counts))[:, None]
    advantages, returns = gae_advantages(*rows, gamma=gamma, lam=lam)
    return advantages[inside].to(rewards_N.device), returns[inside].to(rewards_N.device)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of masked values, each a float64 scalar tensor.

    Three numbers that any number of ranks can exchange and :func:`merge_moments` folds in a fixed order, so that
    whitening sees the global batch and not one rank's share.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        """Unbiased variance; 0 of fewer than two values."""
        return self.squares / (self.count - 1).clamp(min=1)


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of ``values`` where ``mask`` holds; shapes equal, any number of dimensions."""
    mask = mask.bool()
    safe = torch.where(mask, values.double(), 0.0)
    count = mask.sum().double()
    mean = safe.sum() / count.clamp(min=1)
    squares = torch.where(mask, safe - mean, 0.0).square().sum()
    return Moments(count, mean, squares)


def merge_moments(parts: list[Moments]) -> Moments:
    """Moments of the union (Chan, Golub and LeVeque 1979), folded in the order given."""
    if not parts:
        raise ValueError("merge_moments needs the moments of at least one part")
    total = parts[0]
    for part in parts[1:]:
        count = total.count + part.count
        delta = part.mean - total.mean
        share = part.count / count.clamp(min=1)
        squares = total.squares + part.squares + delta.square() * total.count * share
        total = Moments(count, total.mean + delta * share, squares)
    return total


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, moments: Moments | None = None) -> Tensor:
    """Scale masked values to unit variance (unbiased) and, with ``shift_mean``, zero mean; 0 outside the mask.

    ``moments`` are those of the whole batch when ``values`` is a part of it; by default those of ``values``. Fewer
    than two valid values have no variance: they are returned as they are.
    """
    mask = mask.bool()
    moments = masked_moments(values, mask) if moments is None else moments
    safe = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    if float(moments.count) < 2:
        return safe
    scale = torch.rsqrt(moments.squares / (moments.count - 1) + 1e-8)
    centred = (safe.double() - moments.mean) * scale
    if not shift_mean:
        centred = centred + moments.mean
    return torch.where(mask, centred, 0.0).to(values.dtype)
