"""Rectangular batches of token ids, as users hand them in, and the real tokens inside them."""

from torch import Tensor


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None, pad_token_id: int) -> list[list[int]]:
    """Token ids of each row without padding.

    Args:
        input_ids: [B, P].
        attention_mask: [B, P], 1 on real tokens. Without it, pad tokens at the two ends of a row are padding; inside,
            they are text (pad is often the end-of-sequence token).

    Raises:
        ValueError: shapes differ, or a row has no real token.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected [batch, length]")
    if attention_mask is None:
        attention_mask = _without_ends(input_ids, pad_token_id)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; they must agree"
        )
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids.cpu(), attention_mask.cpu(), strict=True)]
    empty = [i for i, row in enumerate(rows) if not row]
    if empty:
        raise ValueError(f"rows {empty[:8]} of input_ids hold nothing but padding; every prompt needs a token")
    return rows


def _without_ends(input_ids: Tensor, pad: int) -> Tensor:
    real = input_ids != pad
    # a position is real text when some real token is at or before it and some at or after it
    after_first = real.int().cumsum(1) > 0
    before_last = real.int().flip(1).cumsum(1).flip(1) > 0
    return after_first & before_last


def response_spans(sequences: Tensor, response_mask: Tensor) -> list[list[int]]:
    """Response tokens of each row.

    Args:
        sequences: [B, P + R].
        response_mask: [B, R] over the last R columns, or [B, P + R].

    Raises:
        ValueError: shapes do not fit, or a response is not one contiguous run.
    """
    width = response_mask.shape[1]
    if response_mask.dim() != 2 or response_mask.shape[0] != sequences.shape[0] or width > sequences.shape[1]:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)}; expected [B, R] or [B, P + R] for sequences of shape "
            f"{tuple(sequences.shape)}"
        )
    mask = response_mask.bool().cpu()
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, :1].sum(1)
    if (starts > 1).any():
        raise ValueError(f"response_mask row {int((starts > 1).int().argmax())} has gaps; a response is one run of tokens")
    tail = sequences.cpu()[:, sequences.shape[1] - width :]
    return [ids[row].tolist() for ids, row in zip(tail, mask, strict=True)]
