"""A packed row on its way through the model: what forward needs and what the loss needs.

Shape legend: T tokens of the row, N tokens of it that are predicted (responses).
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rl3d.models.build import RowBoundaries


@dataclass
class MicroBatch:
    """One packed row.

    Attributes:
        tokens_T, positions_T: int64; positions restart with each sequence.
        lengths: tokens of each sequence, in order.
        select_N: indices into the row whose hidden state predicts a response token.
        labels_N: those response tokens.
        values: further per-token tensors [N], e.g. ``advantages``, ``old_logprobs``, ``weights``.
        counts: how many of the N tokens belong to each sequence, in order.
    """

    tokens_T: Tensor
    positions_T: Tensor
    lengths: tuple[int, ...]
    select_N: Tensor
    labels_N: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    def to(self, device: torch.device) -> "MicroBatch":
        """The same row on another device."""
        return MicroBatch(
            self.tokens_T.to(device), self.positions_T.to(device), self.lengths, self.select_N.to(device),
            self.labels_N.to(device), {k: v.to(device) for k, v in self.values.items()}, self.counts,
        )  # fmt: skip

    def empty(self, length: int = 1) -> "MicroBatch":
        """A row of ``length`` tokens that predicts nothing, with the same values (none of each)."""
        tokens = self.tokens_T[:1].expand(length)
        nothing = self.select_N[:0]
        values = {k: v[:0] for k, v in self.values.items()}
        return MicroBatch(tokens, torch.zeros_like(tokens), (1,) * length, nothing, nothing, values)

    def padded(self, multiple: int) -> "MicroBatch":
        """The same row, its length a multiple of ``multiple``: the tokens added are a sequence of their own, which nobody
        attends to and which predicts nothing."""
        missing = -self.tokens_T.numel() % multiple
        if missing == 0:
            return self
        tokens = torch.nn.functional.pad(self.tokens_T, (0, missing))
        positions = torch.cat([self.positions_T, torch.arange(missing, device=self.positions_T.device)])
        return replace(self, tokens_T=tokens, positions_T=positions, lengths=(*self.lengths, missing))

    def boundaries(self) -> RowBoundaries:
        return RowBoundaries.of(self.lengths, self.tokens_T.device)
