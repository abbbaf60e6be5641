"""The draw inside vLLM: a logits processor that leaves one token of each row. Imported only where vLLM is.

vLLM makes it wherever its workers are, in this process or in others, so all it knows of a sequence comes with vLLM's own
request (:func:`request_arguments`), and what it drew waits in :data:`DRAWN` to be fetched.
"""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from rl3d.generation.sampler import Sampler, SamplingBatch
from rl3d.generation.scheduler import RunningSequence, sampling_columns

Row = tuple[int, bool, float, float, float]
DRAWN: dict[str, dict[int, Row]] = {}
"""Rows of :meth:`rl3d.generation.sampler.Draw.to_host` by the sequence's name and position, of this process's worker."""


def request_arguments(name: str, sequence: RunningSequence) -> dict[str, Any]:
    """``extra_args`` of vLLM's request: the sequence's name and its row of a sampling batch."""
    columns = sampling_columns([sequence])
    return {"rl3d": {"name": name, **{column: values[0] for column, values in columns.items()}}}


class Draws(LogitsProcessor):
    """Draws for the rows whose requests are ours. vLLM then takes the largest logit, the only one that is left.

    Rows come and go as vLLM says. The position of a draw is the prompt's length and that of vLLM's own list of output
    tokens, so a row that is computed again, after it had to give way, draws what it drew before.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        size = vllm_config.model_config.get_vocab_size()
        self.sampler = Sampler(size, size, None, device)
        self.device = device
        self.rows: dict[int, tuple[dict[str, Any], int, list[int]]] = {}  # what is asked, the prompt's length, the response
        self._members: list[int] = []
        self._sampling: SamplingBatch | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows.pop(index, None)
            asked = (params.extra_args or {}).get("rl3d")
            if asked is not None:
                self.rows[index] = (asked, len(prompt), output)
        for a, b, direction in batch_update.moved:
            first, second = self.rows.pop(a, None), self.rows.pop(b, None)
            if first is not None:
                self.rows[b] = first
            if direction == MoveDirectionality.SWAP and second is not None:
                self.rows[a] = second
        self._members = sorted(self.rows)
        self._sampling = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        members = [index for index in self._members if index < len(logits)]
        if not members:  # vLLM tries itself out before there are requests
            return logits
        rows = [self.rows[index] for index in members]
        if self._sampling is None or len(self._sampling.keys) != len(rows):
            columns = {c: [asked[c] for asked, _, _ in rows] for c in ("keys", "temperature", "top_p", "top_k", "min_p")}
            self._sampling = SamplingBatch.build(**columns, device=self.device)
        positions = [length + len(output) for _, length, output in rows]
        chosen = logits if len(rows) == len(logits) else logits[members]
        draw = self.sampler.draw(chosen, self._sampling, torch.tensor(positions, device=self.device))
        for (asked, _, _), position, row in zip(rows, positions, draw.to_host(), strict=True):
            DRAWN.setdefault(asked["name"], {})[position] = row
        left = torch.full_like(chosen, float("-inf")).scatter_(1, draw.tokens[:, None], 0.0)
        if chosen is logits:
            return left
        logits[members] = left
        return logits
