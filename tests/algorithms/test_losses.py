import math

import pytest
import torch

from rl3d.algorithms.losses import kl_penalty, policy_loss, value_loss


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def policy_loss_reference(old, new, adv, mask, low, high, c):
    """verl's compute_policy_loss_vanilla with token-mean aggregation, before the mean."""
    log_ratio = torch.clamp(new - old, min=-20.0, max=20.0)
    ratio = torch.exp(log_ratio)
    losses1 = -adv * ratio
    losses2 = -adv * torch.clamp(ratio, 1 - low, 1 + high)
    clipped1 = torch.maximum(losses1, losses2)
    losses3 = -adv * c
    clipped2 = torch.min(losses3, clipped1)
    return (
        torch.where(adv < 0, clipped2, clipped1),
        masked_mean(torch.gt(losses2, losses1).float(), mask),
        masked_mean(torch.gt(clipped1, losses3) * (adv < 0).float(), mask),
        masked_mean(-log_ratio, mask),
    )


def low_var_kl_reference(logprob, ref_logprob):
    """verl's kl_penalty "low_var_kl"."""
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    ratio = torch.exp(kl)
    return torch.clamp((ratio - kl - 1).contiguous(), min=-10, max=10)


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    new, old = -3 * torch.rand(200), -3 * torch.rand(200)
    return new, old, torch.randn(200), torch.rand(200) > 0.3


def test_policy_loss_matches_verl(tokens):
    new, old, adv, mask = tokens
    loss, sums = policy_loss(new, old, adv, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    expected, clipfrac, lower, ppo_kl = policy_loss_reference(old, new, adv, mask, 0.2, 0.28, 3.0)
    torch.testing.assert_close(loss, expected * mask)
    for name, value in (("clipfrac", clipfrac), ("clipfrac_lower", lower), ("ppo_kl", ppo_kl)):
        torch.testing.assert_close(sums[name] / sums["tokens"], value)
    assert 0 < sums["clipfrac_lower"] < sums["clipfrac"] < sums["tokens"] == mask.sum()


def test_metric_sums_add_up_over_any_split(tokens):
    whole = policy_loss(*tokens).sums
    parts = [policy_loss(*(x[cut] for x in tokens)).sums for cut in (slice(0, 7), slice(7, 120), slice(120, 200))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, rtol=1e-5, atol=1e-4)


def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped(tokens):
    new, _, adv, mask = tokens
    loss, sums = policy_loss(new, new.clone(), adv, mask, dual_clip=3.0)
    torch.testing.assert_close(loss, -adv * mask)
    assert sums["clipfrac"] == sums["clipfrac_lower"] == sums["ppo_kl"] == 0 and sums["ratio"] == mask.sum()


def test_a_response_twice_as_long_has_the_same_ratios(tokens):
    # a ratio of the whole response would square (sum of log ratios)
    once, twice = policy_loss(*tokens), policy_loss(*(torch.cat([x, x]) for x in tokens))
    assert torch.equal(twice.per_token, torch.cat([once.per_token, once.per_token]))
    for name, value in once.sums.items():
        torch.testing.assert_close(twice.sums[name], 2 * value)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_masked_slot_poisons_neither_loss_nor_gradient(poison):
    new = torch.tensor([0.0, poison], requires_grad=True)
    mask = torch.tensor([1, 0])
    loss, sums = policy_loss(new, torch.tensor([0.0, poison]), torch.tensor([1.0, poison]), mask, dual_clip=3.0)
    assert loss.tolist() == [-1.0, 0.0] and all(math.isfinite(value) for value in sums.values())
    (loss.sum() + kl_penalty(new, torch.tensor([0.5, poison]), mask).sum()).backward()
    assert torch.isfinite(new.grad).all() and new.grad[1] == 0
    assert value_loss(new.detach(), new.detach(), torch.tensor([1.0, poison]), mask).per_token.tolist() == [0.5, 0.0]


def test_huge_log_ratios_stay_finite():
    loss, _ = policy_loss(torch.tensor([500.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), torch.tensor([True]))
    assert torch.isfinite(loss).all()
    kl = kl_penalty(torch.tensor([-500.0, 500.0]), torch.tensor([500.0, -500.0]), torch.ones(2))
    assert kl.tolist() == [10.0, 10.0]


def test_k3_is_verls_low_var_kl_and_leaves_the_inputs_alone(tokens):
    new, ref, _, _ = tokens
    before = new.clone()
    mask = torch.ones(200)
    expected = low_var_kl_reference(new, ref)
    torch.testing.assert_close(kl_penalty(new, ref, mask, "k3"), expected)
    torch.testing.assert_close(kl_penalty(new, ref, mask, "low_var_kl"), expected)
    assert (expected >= 0).all() and torch.equal(new, before)


def test_estimators_average_to_the_kl_and_their_gradients_are_as_documented():
    # Expectation over a small vocabulary, exactly.
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.1, 0.4, 0.2, -0.3]), 0)
    logprobs = torch.log_softmax(logits, 0)
    probs = logprobs.exp()
    true_kl = (probs * (logprobs - ref)).sum()
    (true_gradient,) = torch.autograd.grad(true_kl, logits, retain_graph=True)

    def expected(name):
        value = (probs.detach() * kl_penalty(logprobs, ref, torch.ones(4), name)).sum()
        return value, torch.autograd.grad(value, logits, retain_graph=True)[0]

    for name in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close(expected(name)[0], true_kl)
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(expected(name)[1], true_gradient)
    assert expected("k1")[1].abs().max() < 1e-6
    assert (expected("k3")[1] - true_gradient).abs().max() > 1e-3


def test_unknown_estimator_and_bad_clip_are_named():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="'k9' is unknown"):
        kl_penalty(one, one, one, "k9")
    with pytest.raises(ValueError, match="dual_clip=1.0"):
        policy_loss(one, one, one, one, dual_clip=1.0)
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(one, torch.zeros(2), one, one)


def test_value_loss_matches_verl():
    torch.manual_seed(5)
    new, old, returns, mask = torch.randn(50), torch.randn(50), torch.randn(50), torch.rand(50) > 0.5
    clipped = torch.clamp(new, old - 0.2, old + 0.2)
    losses1, losses2 = (new - returns) ** 2, (clipped - returns) ** 2
    loss, sums = value_loss(new, old, returns, mask, clip=0.2)
    torch.testing.assert_close(loss, 0.5 * torch.max(losses1, losses2) * mask)
    torch.testing.assert_close(sums["vf_clipfrac"], (torch.gt(losses2, losses1).float() * mask).sum())
    unclipped, _ = value_loss(new, old, returns, mask, clip=None)
    torch.testing.assert_close(unclipped, 0.5 * losses1 * mask)
