"""Sequences of different lengths in one row, and values back out of it.

A row holds whole sequences end to end. Positions restart with each of them and attention stays inside ``cu_seqlens``.
A label is the next token of the same sequence, so the last token of a sequence has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""Label of positions that predict nothing."""


class TokenSequence(Protocol):
    """Anything with a prompt and a response in tokens, such as :class:`rl3d.data.batch.Sample`."""

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass
class PackedRow:
    """One row of T tokens. Padding, if any, is a last sequence of its own that belongs to no sample.

    ``tokens`` int64 [T]; ``positions`` int64 [T], restarting per sequence; ``cu_seqlens`` int32 [S + 1];
    ``max_seqlen`` the longest sequence; ``labels`` int64 [T], the next token or :data:`IGNORE`; ``mask`` bool [T], true
    where the label is a response token; ``sample_of`` int64 [T], index into the samples that :func:`build_row` was
    given, -1 on padding; ``token_of`` int64 [T], index of the label within its response, -1 outside the mask;
    ``samples``, the samples in the row.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    labels: Tensor
    mask: Tensor
    sample_of: Tensor
    token_of: Tensor
    samples: list[int]

    def to(self, device: torch.device | str) -> "PackedRow":
        """The same row on another device."""
        tensors: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.type is Tensor}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def build_row(
    samples: Sequence[TokenSequence], indices: Sequence[int], pad_to_multiple: int = 1, pad_token: int = 0
) -> PackedRow:
    """Lay the samples at ``indices`` end to end. No indices give a row of padding only, which predicts nothing.

    Raises ``ValueError`` for a sample without a prompt token: nothing would predict its first response token.
    """
    chosen = [samples[index] for index in indices]
    for index, sample in zip(indices, chosen, strict=True):
        if not sample.prompt_ids:
            raise ValueError(f"sample {index} has no prompt token; a prompt needs at least one (a BOS, for example)")
    prompts = [len(sample.prompt_ids) for sample in chosen]
    lengths = [n + len(sample.response_ids) for n, sample in zip(prompts, chosen, strict=True)]
    total = sum(lengths)
    padding = -total % pad_to_multiple if total else pad_to_multiple
    ids = chain.from_iterable(chain(sample.prompt_ids, sample.response_ids) for sample in chosen)
    tokens_T = np.full(total + padding, pad_token, np.int64)
    tokens_T[:total] = np.fromiter(ids, np.int64, total)
    sizes = np.array([*lengths, *[padding] * (padding > 0)], np.int64)
    ends = np.cumsum(sizes)
    positions_T = np.arange(total + padding) - np.repeat(ends - sizes, sizes)
    labels_T = np.append(tokens_T[1:], IGNORE)
    labels_T[ends - 1] = IGNORE
    labels_T[total:] = IGNORE
    # the token at the end of a prompt predicts the first one of the response
    token_of_T = positions_T - np.repeat([n - 1 for n in prompts] + [0] * (padding > 0), sizes)
    token_of_T[labels_T == IGNORE] = -1
    token_of_T = np.maximum(token_of_T, -1)
    return PackedRow(
        tokens=torch.from_numpy(tokens_T),
        positions=torch.from_numpy(positions_T),
        cu_seqlens=torch.from_numpy(np.append(0, ends).astype(np.int32)),
        max_seqlen=int(sizes.max()),
        labels=torch.from_numpy(labels_T),
        mask=torch.from_numpy(token_of_T >= 0),
        sample_of=torch.from_numpy(np.repeat([*indices, *[-1] * (padding > 0)], sizes)),
        token_of=torch.from_numpy(token_of_T),
        samples=list(indices),
    )


def unpack_values(row: PackedRow, values_T: Tensor) -> dict[int, Tensor]:
    """Values of the response tokens of each sample in the row, in order: sample index -> [len(response)]."""
    if values_T.shape != row.mask.shape:
        raise ValueError(f"values {tuple(values_T.shape)} must have one entry per token of the row, {len(row.mask)}")
    return dict(zip(row.samples, values_T[row.mask].split(_counts(row)), strict=True))


def scatter_values(
    row: PackedRow,
    values: Sequence[Sequence[float] | Tensor] | Mapping[int, Sequence[float] | Tensor],
    dtype: torch.dtype = torch.float,
) -> Tensor:
    """The inverse: per-response values, indexed by sample, at the positions that predict them; 0 elsewhere.

    Raises ``ValueError`` when a sample's values and response differ in length.
    """
    for index, count in zip(row.samples, _counts(row), strict=True):
        if len(values[index]) != count:
            raise ValueError(f"sample {index}: {len(values[index])} values for {count} response tokens")
    out_T = torch.zeros(row.mask.shape, dtype=dtype, device=row.mask.device)
    mine = [values[index] for index in row.samples]
    if any(isinstance(value, Tensor) for value in mine):
        out_T[row.mask] = torch.cat([torch.as_tensor(value, dtype=dtype, device=out_T.device) for value in mine])
    elif mine:
        flat = np.fromiter(chain.from_iterable(mine), np.float64)
        out_T[row.mask] = torch.from_numpy(flat).to(out_T)
    return out_T


def _counts(row: PackedRow) -> list[int]:
    """Response tokens of each sample of the row, which lie one sample after the other."""
    counts = torch.bincount(row.sample_of[row.mask], minlength=max(row.samples, default=-1) + 1).tolist()
    return [counts[index] for index in row.samples]
