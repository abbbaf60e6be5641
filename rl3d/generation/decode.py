"""What a decode batch keeps on the device between steps."""

from collections.abc import Sequence

import numpy as np
import torch

from rl3d.generation.pages import SCRATCH
from rl3d.generation.sampler import SamplingBatch
from rl3d.generation.scheduler import RunningSequence, sampling_columns
from rl3d.generation.transfer import to_device


class BlockTable:
    """Which pages the rows of the decode batch hold, int32 [rows, columns]; the device's copy keeps its address."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._host = np.full((rows, columns), SCRATCH, dtype=np.int32)
        shared = torch.from_numpy(self._host)
        self.tensor = shared if device.type == "cpu" else shared.to(device)
        # in turn: a copy may be on its way while the next step's pages are written
        self._staging = [shared.clone().pin_memory() for _ in range(2)] if device.type == "cuda" else []

    def fill(self, sequences: Sequence[RunningSequence]) -> None:
        """Write the rows of a new batch."""
        for row, sequence in enumerate(sequences):
            sequence.row = row
            self._host[row, len(sequence.pages) :] = SCRATCH
        self.update(sequences)

    def update(self, sequences: Sequence[RunningSequence]) -> None:
        """Write the rows of sequences of the batch whose pages changed."""
        for sequence in sequences:
            self._host[sequence.row, : len(sequence.pages)] = sequence.pages
        if sequences and self._staging:
            self._staging.reverse()
            self._staging[0].copy_(torch.from_numpy(self._host))
            self.tensor.copy_(self._staging[0], non_blocking=True)


class DecodeState:
    """A decode batch: its members in the order of its rows, ended ones included, and tensors that stay on the device."""

    def __init__(self, running: list[RunningSequence], membership: int, min_rows: int, device: torch.device) -> None:
        self.members, self.rows, self.membership = list(running), len(running), membership
        padding = [0] * (min_rows - self.rows)
        self.sampling = SamplingBatch.build(**sampling_columns(running), device=device)
        self.tokens = to_device([s.result.token_ids[-1] for s in running] + padding, torch.int64, device)
        # position of the token that goes in, the newest one
        self.positions = to_device([s.length - 1 for s in running] + padding, torch.int64, device)
        self.longest = max(s.length for s in running)
