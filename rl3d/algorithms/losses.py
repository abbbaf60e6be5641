"""Policy, value and KL losses per token.

Every function returns values per token together with metric *sums* over the mask. Nothing here divides by a number of
tokens: the caller knows the global batch, weighs the tokens (:mod:`rl3d.algorithms.aggregation`) and divides the summed
metrics by the summed ``tokens``.

Values outside the mask never matter: they are replaced before any arithmetic, so a NaN or an infinity there reaches
neither the loss nor a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


class TokenLoss(NamedTuple):
    """``per_token`` has the shape of the inputs, 0 outside the mask; ``sums`` are detached scalars."""

    per_token: Tensor
    sums: dict[str, Tensor]


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"token tensors must have one shape, got {shapes}")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate of PPO (arXiv:1707.06347) for each token.

    ``clip_high`` (default ``clip_low``) may differ from ``clip_low`` (DAPO's clip-higher, arXiv:2503.14476).
    ``dual_clip`` c > 1 bounds the loss of tokens with negative advantage by ``-c * advantage`` (arXiv:1912.09729).
    The log ratio is clamped to ±20 before ``exp``, as in verl. It is a token's own: neither the sum over a response, which
    grows with its length, nor the mean over it (GSPO, arXiv:2507.18071).

    Sums: ``tokens``; ``clipfrac`` tokens whose clipped branch is the larger loss; ``clipfrac_lower`` tokens held by
    ``dual_clip``; ``ppo_kl`` old - new logprob (k1 estimate of KL(old, new)); ``ratio``.
    Raises ``ValueError`` on differing shapes or ``dual_clip`` <= 1.
    """
    _check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1; leave it out to turn dual clipping off")
    clip_high = clip_low if clip_high is None else clip_high
    mask = mask.bool()
    new, old, adv = (_inside(mask, x.float()) for x in (logprobs, old_logprobs, advantages))
    log_ratio = (new - old).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    sums = {"clipfrac": (clipped > plain) & mask}
    if dual_clip is None:
        sums["clipfrac_lower"] = torch.zeros_like(mask)
    else:
        bound = -adv * dual_clip
        sums["clipfrac_lower"] = (loss > bound) & (adv < 0) & mask
        loss = torch.where(adv < 0, torch.minimum(bound, loss), loss)
    sums |= {"ppo_kl": -log_ratio, "ratio": _inside(mask, ratio), "tokens": mask}
    return TokenLoss(_inside(mask, loss), {name: x.detach().float().sum() for name, x in sums.items()})


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy, reference) at tokens sampled from the policy; 0 outside the mask.

    With ``d = logprob - ref_logprob`` (joschu.net/blog/kl-approx.html; names in brackets are verl's):

    - ``k1`` (``kl``): d, unbiased, may be negative;
    - ``abs``: |d|;
    - ``k2`` (``mse``): d²/2, biased value, and its gradient is the unbiased gradient of the KL;
    - ``k3`` (``low_var_kl``): exp(-d) - 1 + d, never negative; -d is clamped to ±20 and the result to at most 10.

    The value of k3 is unbiased, its gradient is not (nor is k1's, whose expected gradient is 0). A trailing ``+``, as
    in ``k3+``, keeps the estimator's value and takes k2's gradient. Raises ``ValueError`` on an unknown name.
    """
    _check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    straight_through = estimator.endswith("+")
    name = estimator.removesuffix("+")
    name = _ALIASES.get(name, name)
    if name not in KL_ESTIMATORS:
        raise ValueError(
            f"KL estimator {estimator!r} is unknown; use one of {', '.join(KL_ESTIMATORS)}, with '+' for k2's gradient"
        )
    mask = mask.bool()
    diff = _inside(mask, logprobs.float()) - _inside(mask, ref_logprobs.float())
    if name == "k1":
        value = diff
    elif name == "abs":
        value = diff.abs()
    elif name == "k2":
        value = 0.5 * diff.square()
    else:
        minus_diff = (-diff).clamp(-20.0, 20.0)
        value = (minus_diff.exp() - 1.0 - minus_diff).clamp(max=10.0)
    if straight_through:
        gradient_of = 0.5 * diff.square()
        value = value.detach() + gradient_of - gradient_of.detach()
    return _inside(mask, value)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.5) -> TokenLoss:
    """Half the squared error to the returns, clipped around the old values as in OpenAI's PPO2 and verl.

    ``clip=None`` turns clipping off. Sums: ``tokens``; ``vf_clipfrac`` tokens whose clipped error is the larger one;
    ``value`` the values themselves.
    """
    _check_shapes(values=values, old_values=old_values, returns=returns, mask=mask)
    mask = mask.bool()
    new, old, target = (_inside(mask, x.float()) for x in (values, old_values, returns))
    error = (new - target).square()
    clipped_error = error if clip is None else (torch.clamp(new, old - clip, old + clip) - target).square()
    sums = {"vf_clipfrac": clipped_error > error, "value": new, "tokens": mask}
    loss = 0.5 * torch.maximum(error, clipped_error)
    return TokenLoss(_inside(mask, loss), {name: x.detach().float().sum() for name, x in sums.items()})
