"""Prompts without a data set and rewards without a meaning, for measuring speed."""

import random
from typing import Any

from rl3d.data.batch import Prompt
from rl3d.data.dataset import PromptStream


class RandomPrompts(PromptStream):
    """An endless stream of prompts of one length, tokens drawn from ``[10, vocab_size)``.

    Args:
        batch_size: prompts in a batch.
        length: tokens of each.
        vocab_size: of the model.
    """

    def __init__(self, batch_size: int, length: int, vocab_size: int, seed: int = 0):
        self.batch_size, self.length, self.vocab_size = batch_size, length, vocab_size
        self.epoch = 0
        self._random = random.Random(seed)
        self._count = 0

    @property
    def batches_per_epoch(self) -> int:
        return 1

    def next_batch(self) -> list[Prompt]:
        """The next prompts, the same on every rank."""
        out = []
        for _ in range(self.batch_size):
            ids = [self._random.randrange(10, self.vocab_size) for _ in range(self.length)]
            out.append(Prompt(f"random-{self._count}", self._count, None, None, ids))
            self._count += 1
        return out

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], *, restart_on_new_data: bool = False) -> None:
        """Nothing is kept."""


def coin(prompt: str, response: str) -> float:
    """0 or 1, whatever the response."""
    return float(random.random() < 0.5)
