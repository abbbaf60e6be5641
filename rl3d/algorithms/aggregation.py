"""From losses per token to one loss, the same for every micro-batch split, packing and number of data-parallel ranks.

Every supported mean is a weighted sum over tokens in which all tokens of one sample weigh the same and the weight
depends on totals of the whole (mini-)batch only. So weights are computed once from the global batch, each rank sums
``weight * loss`` over the tokens it happens to hold, and plain sums over micro-batches and ranks give the loss.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


class BatchTotals(NamedTuple):
    """Totals of a whole mini-batch: trainable tokens, and samples that have at least one."""

    tokens: int
    sequences: int


def batch_totals(counts_N: Tensor) -> BatchTotals:
    """Totals from the number of trainable tokens of every sample of the mini-batch (0 for a failed sample)."""
    return BatchTotals(int(counts_N.sum()), int((counts_N > 0).sum()))


def sample_weights(counts_N: Tensor, mode: str = "token-mean", totals: BatchTotals | None = None) -> Tensor:
    """Weight of each token of each sample, float64 [N]; verl's ``agg_loss`` modes.

    - ``token-mean``: 1 / tokens of the batch;
    - ``seq-mean-token-sum``: 1 / samples of the batch;
    - ``seq-mean-token-mean``: 1 / samples / tokens of this sample.

    ``counts_N`` are the trainable tokens of these samples; ``totals`` those of the whole mini-batch when it holds more
    samples than these. Samples without trainable tokens do not count as samples and weigh 0. A batch without any
    trainable token weighs 0 everywhere: a loss of 0, never 0/0.
    Raises ``ValueError`` on an unknown mode or negative counts.
    """
    if mode not in MODES:
        raise ValueError(f"loss aggregation {mode!r} is unknown; use one of {', '.join(MODES)}")
    if counts_N.numel() and int(counts_N.min()) < 0:
        raise ValueError(f"token counts must not be negative, got {counts_N.tolist()}")
    totals = batch_totals(counts_N) if totals is None else totals
    own = batch_totals(counts_N)
    if own.tokens > totals.tokens or own.sequences > totals.sequences:
        raise ValueError(f"these samples hold {own}, more than the whole batch, {totals}; pass the global totals")
    counts_N = counts_N.double()
    has_tokens_N = (counts_N > 0).double()
    if mode == "token-mean":
        return has_tokens_N / max(totals.tokens, 1)
    weights_N = has_tokens_N / max(totals.sequences, 1)
    return weights_N if mode == "seq-mean-token-sum" else weights_N / counts_N.clamp(min=1)


def token_weights(
    mask_T: Tensor,
    sample_of_T: Tensor,
    counts_N: Tensor,
    mode: str = "token-mean",
    totals: BatchTotals | None = None,
) -> Tensor:
    """Weights [T] float32 of a packed row: ``sample_of_T`` says to which of the N samples each position belongs.

    Positions outside ``mask_T`` weigh 0, whatever ``sample_of_T`` says there. See :func:`sample_weights`.
    """
    weights_N = sample_weights(counts_N, mode, totals).to(mask_T.device)
    mask_T = mask_T.bool()
    safe_T = torch.where(mask_T, sample_of_T.long(), 0)
    if not len(weights_N):
        return torch.zeros(mask_T.shape, dtype=torch.float32, device=mask_T.device)
    return torch.where(mask_T, weights_N[safe_T], 0.0).float()
