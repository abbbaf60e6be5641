"""Sequences of different lengths in one row, and values back out of it.

A row holds whole sequences end to end. Positions restart with each of them and attention stays inside ``cu_seqlens``.
A label is the next token of the same sequence, so the last token of a sequence has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

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
    tokens: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    sample_of: list[int] = []
    token_of: list[int] = []
    ends = [0]
    for index in indices:
        prompt, response = samples[index].prompt_ids, samples[index].response_ids
        if not prompt:
            raise ValueError(f"sample {index} has no prompt token; a prompt needs at least one (a BOS, for example)")
        ids = [*prompt, *response]
        tokens += ids
        positions += range(len(ids))
        labels += [*ids[1:], IGNORE]
        sample_of += [index] * len(ids)
        token_of += [*[-1] * (len(prompt) - 1), *range(len(response)), -1]
        ends.append(len(tokens))
    padding = -len(tokens) % pad_to_multiple if tokens else pad_to_multiple
    if padding:
        tokens += [pad_token] * padding
        positions += range(padding)
        labels += [IGNORE] * padding
        sample_of += [-1] * padding
        token_of += [-1] * padding
        ends.append(len(tokens))
    token_of_T = torch.tensor(token_of, dtype=torch.int64)
    return PackedRow(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in zip(ends, ends[1:])),
        labels=torch.tensor(labels, dtype=torch.int64),
        mask=token_of_T >= 0,
        sample_of=torch.tensor(sample_of, dtype=torch.int64),
        token_of=token_of_T,
        samples=list(indices),
    )


def unpack_values(row: PackedRow, values_T: Tensor) -> dict[int, Tensor]:
    """Values of the response tokens of each sample in the row, in order: sample index -> [len(response)]."""
    if values_T.shape != row.mask.shape:
        raise ValueError(f"values {tuple(values_T.shape)} must have one entry per token of the row, {len(row.mask)}")
    return {index: values_T[row.mask & (row.sample_of == index)] for index in row.samples}


def scatter_values(
    row: PackedRow,
    values: Sequence[Sequence[float] | Tensor] | Mapping[int, Sequence[float] | Tensor],
    dtype: torch.dtype = torch.float,
) -> Tensor:
    """The inverse: per-response values, indexed by sample, at the positions that predict them; 0 elsewhere.

    Raises ``ValueError`` when a sample's values and response differ in length.
    """
    out_T = torch.zeros(row.mask.shape, dtype=dtype, device=row.mask.device)
    for index in row.samples:
        where = row.mask & (row.sample_of == index)
        if len(values[index]) != int(where.sum()):
            raise ValueError(f"sample {index}: {len(values[index])} values for {int(where.sum())} response tokens")
        out_T[where] = torch.as_tensor(values[index], dtype=dtype, device=row.mask.device)
    return out_T
