"""Which response tokens count, and where a sequence's score sits."""

from collections.abc import Iterable

import torch
from torch import Tensor


def response_mask(ids_NT: Tensor, stop_ids: Iterable[int], lengths_N: Tensor | None = None) -> Tensor:
    """Tokens of each response that were really sampled: up to and including the first stop token.

    ``ids_NT`` are right-padded response ids. Where the true ``lengths_N`` are known they decide too, so a response
    that ran out of budget ends where it ended and not at the padded width; where padding and stop token share an id,
    only the first one counts.

    Returns bool [N, T]. Raises ``ValueError`` when a length does not fit the width.
    """
    width = ids_NT.shape[1]
    is_stop_NT = torch.zeros_like(ids_NT, dtype=torch.bool)
    for stop in stop_ids:
        is_stop_NT |= ids_NT == stop
    stops_before_NT = is_stop_NT.long().cumsum(1) - is_stop_NT.long()
    mask_NT = stops_before_NT == 0
    if lengths_N is not None:
        if lengths_N.numel() and (int(lengths_N.min()) < 0 or int(lengths_N.max()) > width):
            raise ValueError(
                f"response lengths {lengths_N.tolist()} must lie between 0 and the padded width {width}; "
                "pass the number of sampled tokens of each row"
            )
        mask_NT &= torch.arange(width, device=ids_NT.device) < lengths_N[:, None]
    return mask_NT


def scores_at_last_token(scores_N: Tensor, mask_NT: Tensor) -> Tensor:
    """Per-token rewards [N, T] with each score on the last valid token and 0 elsewhere; an empty row stays 0.

    The last valid token is the stop token itself when there is one, never the padding after it, and is taken from the
    mask, so holes in it and ``pad == eos`` do not move the score.
    """
    mask_NT = mask_NT.bool()
    valid_after_NT = mask_NT.flip(1).long().cumsum(1).flip(1)
    last_NT = mask_NT & (valid_after_NT == 1)
    return torch.where(last_NT, scores_N[:, None], torch.zeros((), dtype=scores_N.dtype, device=scores_N.device))
