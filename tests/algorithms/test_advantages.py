import math

import pytest
import torch

from rl3d.algorithms.advantages import (
    gae_advantages,
    grpo_advantages,
    masked_moments,
    merge_moments,
    packed_gae,
    whiten,
)
from rl3d.algorithms.masks import response_mask, scores_at_last_token


def grpo_reference(scores, groups, normalize_by_std=True, eps=1e-6):
    """verl's compute_grpo_outcome_advantage as published, for groups of two and more."""
    members = {}
    for score, group in zip(scores, groups):
        members.setdefault(group, []).append(score)
    out = []
    for score, group in zip(scores, groups):
        values = torch.tensor(members[group])
        centred = score - values.mean()
        out.append(centred / (values.std() + eps) if normalize_by_std else centred)
    return torch.tensor(out)


def gae_reference(rewards, values, mask, gamma, lam):
    """verl's compute_gae_advantage_return before whitening."""
    next_values, last, reversed_advantages = 0, 0, []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        step = delta + gamma * lam * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = step * mask[:, t] + (1 - mask[:, t]) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def test_uneven_groups_are_normalised_each_for_itself():
    adv = grpo_advantages(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(adv, torch.tensor([-0.7071, 0.7071, 0.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_matches_verl_on_interleaved_groups_of_different_sizes(normalize):
    torch.manual_seed(0)
    groups = [7, 3, 7, 7, 3, 900, 900, 3, 3, 900]
    scores = torch.randn(10)
    adv = grpo_advantages(scores, torch.tensor(groups), normalize_by_std=normalize)
    torch.testing.assert_close(adv, grpo_reference(scores.tolist(), groups, normalize), atol=1e-5, rtol=1e-5)


def test_advantages_do_not_depend_on_the_order_of_samples():
    torch.manual_seed(1)
    scores, groups = torch.randn(24), torch.arange(24) // 4
    order = torch.randperm(24)
    torch.testing.assert_close(grpo_advantages(scores[order], groups[order]), grpo_advantages(scores, groups)[order])


def test_failed_and_rejected_samples_leave_the_group_statistics_alone():
    scores = torch.tensor([1.0, 3.0, math.nan, 100.0, math.inf])
    valid = torch.tensor([True, True, True, False, True])
    adv = grpo_advantages(scores, torch.zeros(5, dtype=torch.long), valid)
    torch.testing.assert_close(adv, torch.tensor([-0.7071, 0.7071, 0.0, 0.0, 0.0]), atol=1e-4, rtol=0)


def test_a_group_without_any_score_is_zero_and_others_stay_finite():
    scores = torch.tensor([math.nan, math.nan, 0.0, 1.0])
    adv = grpo_advantages(scores, torch.tensor([0, 0, 1, 1]))
    assert adv[:2].tolist() == [0.0, 0.0] and torch.isfinite(adv).all() and adv[3] > 0.7


def test_equal_scores_give_exactly_zero():
    adv = grpo_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long))
    assert adv.abs().max() < 1e-9


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one per sample"):
        grpo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_masked_critic_values_do_not_bootstrap():
    adv, returns = gae_advantages(
        torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]]), torch.tensor([[1, 1, 0]])
    )
    torch.testing.assert_close(adv, torch.tensor([[0.95, 1.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.95, 1.0, 0.0]]))


def test_gae_matches_verl_on_ragged_rows():
    torch.manual_seed(2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    rewards, values = torch.randn(3, 5) * mask, torch.randn(3, 5)
    adv, returns = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    expected, expected_returns = gae_reference(rewards, values, mask, 0.9, 0.8)
    torch.testing.assert_close(adv, expected * mask)
    torch.testing.assert_close(returns, expected_returns * mask)
    poisoned = torch.where(mask.bool(), values, math.nan)
    torch.testing.assert_close(gae_advantages(rewards, poisoned, mask, gamma=0.9, lam=0.8)[0], adv)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.97, 0.0)])
def test_gae_on_packed_rows_equals_its_definition_sequence_by_sequence(gamma, lam):
    """sum over l of (gamma lam)^l delta (arXiv:1506.02438, eq. 16), with an empty and a failed response."""
    torch.manual_seed(6)
    counts = [3, 1, 0, 7, 2]
    rewards, values = torch.randn(sum(counts)), torch.randn(sum(counts))
    failed = torch.tensor([False, False, False, False, True]).repeat_interleave(torch.tensor(counts))
    advantages, returns = packed_gae(rewards, torch.where(failed, math.nan, values), ~failed, counts, gamma=gamma, lam=lam)
    start = 0
    for count in counts[:-1]:
        r, v = rewards[start : start + count].tolist(), values[start : start + count].tolist()
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < count else 0.0) - v[t] for t in range(count)]
        for t in range(count):
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, count))
            assert float(advantages[start + t]) == pytest.approx(expected, abs=1e-5)
            assert float(returns[start + t]) == pytest.approx(expected + v[t], abs=1e-5)
        start += count
    assert not advantages[failed].any() and not returns[failed].any()


def test_without_values_advantages_are_the_discounted_rewards_that_follow():
    """verl's compute_reinforce_plus_plus_outcome_advantage before whitening."""
    rewards, counts, gamma = torch.tensor([0.5, 0.0, 2.0, -1.0, 4.0]), [3, 2], 0.5
    advantages, returns = packed_gae(rewards, None, torch.ones(5), counts, gamma=gamma, lam=0.3)
    assert advantages.tolist() == returns.tolist() == [0.5 + 0.25 * 2.0, 1.0, 2.0, -1.0 + 0.5 * 4.0, 4.0]
    with pytest.raises(ValueError, match="5 rewards"):
        packed_gae(rewards, None, torch.ones(5), [3, 3])


def test_whitening_is_verls_and_skips_a_lone_token():
    torch.manual_seed(3)
    values, mask = torch.randn(4, 6) * 3 + 2, torch.rand(4, 6) > 0.4
    inside = values[mask]
    expected = (values - inside.mean()) * torch.rsqrt(inside.var() + 1e-8)
    torch.testing.assert_close(whiten(values, mask), torch.where(mask, expected, 0.0), atol=1e-5, rtol=1e-5)
    kept_mean = whiten(values, mask, shift_mean=False)[mask]
    torch.testing.assert_close(kept_mean.mean(), inside.mean(), atol=1e-4, rtol=0)
    lone = whiten(torch.tensor([2.5, math.nan]), torch.tensor([True, False]))
    assert lone.tolist() == [2.5, 0.0]


def test_whitening_of_parts_equals_whitening_of_the_whole():
    torch.manual_seed(4)
    values, mask = torch.randn(9) * 5 + 100, torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
    cuts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    merged = merge_moments([masked_moments(values[c], mask[c]) for c in cuts])
    parts = torch.cat([whiten(values[c], mask[c], moments=merged) for c in cuts])
    torch.testing.assert_close(parts, whiten(values, mask))


def test_response_mask_ends_at_the_first_stop_token_or_the_true_length():
    # pad == eos: only the first one was sampled
    assert response_mask(torch.tensor([[5, 2, 2, 2]]), [2]).tolist() == [[True, True, False, False]]
    # no stop token: the true length decides
    ids = torch.tensor([[5, 6, 0, 0]])
    assert response_mask(ids, [2], torch.tensor([2])).tolist() == [[True, True, False, False]]
    # a response of the stop token only has length 1
    assert response_mask(torch.tensor([[2, 0]]), [2, 9]).tolist() == [[True, False]]
    with pytest.raises(ValueError, match="padded width 4"):
        response_mask(ids, [2], torch.tensor([5]))


def test_score_sits_on_the_last_valid_token():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0]])
    rewards = scores_at_last_token(torch.tensor([3.0, 4.0, 5.0, 6.0]), mask)
    assert rewards.argmax(1).tolist() == [2, 0, 0, 2]
    assert rewards.sum(1).tolist() == [3.0, 4.0, 0.0, 6.0]
