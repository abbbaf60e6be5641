"""Generation with ``model.generate()`` of transformers: any Hugging Face causal model on one device.

transformers runs the model and its cache; the draws are ours. A logits processor draws with the stateless noise and
leaves only the drawn token, so that results mean the same, and with equal logits are the same, as those of the
built-in generator.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Progress, Request, Result
from rl3d.generation.sampler import Sampler, SamplingBatch
from rl3d.generation.scheduler import RunningSequence, expand, sampling_columns


class HFGenerator:
    """Batches of left-padded prompts through ``model.generate()``.

    Args:
        model: a transformers causal language model, unsharded, on its device.
        max_sequences: prompts a batch; a batch ends with its longest sequence.
    """

    def __init__(self, model: Any, *, max_sequences: int = 16) -> None:
        self.model, self.max_sequences = model, max_sequences
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        self.sampler = Sampler(self.vocab_size, self.vocab_size, None, self.device)
        self.weights_version: int | None = 0

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], on_finish: OnFinish | None = None, on_step: OnStep | None = None
    ) -> list[Result]:
        """As :meth:`rl3d.generation.engine.GenerationEngine.generate`. Raises GenerationError on an empty prompt."""
        for index, request in enumerate(requests):
            if not request.prompt_ids:
                raise GenerationError(f"request {index} (key {request.key}): the prompt is empty; give at least one token")
        sequences = expand(requests)
        training = self.model.training
        self.model.eval()
        try:
            self._run_all(sequences, on_finish, on_step)
        finally:
            self.model.train(training)
        return [s.result for s in sequences]

    def _run_all(self, sequences: list[RunningSequence], on_finish: OnFinish | None, on_step: OnStep | None) -> None:
        for start in range(0, len(sequences), self.max_sequences):
            batch = sequences[start : start + self.max_sequences]
            self._run([s for s in batch if s.params.max_new_tokens > 0])
            done = start + len(batch)
            if on_finish is not None:
                for sequence in batch:
                    on_finish(sequence.result)
            if on_step is not None:
                tokens = sum(len(s.result.token_ids) for s in sequences[:done])
                on_step(Progress(len(sequences) - done, 0, done, tokens))

    def _run(self, batch: list[RunningSequence]) -> None:
        if not batch:
            return
        width = max(len(s.prompt) for s in batch)
        padded = [[0] * (width - len(s.prompt)) + s.prompt for s in batch]
        mask = [[0] * (width - len(s.prompt)) + [1] * len(s.prompt) for s in batch]
        drawer = _Drawer(self.sampler, batch, self.device)
        self.model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max(s.params.max_new_tokens for s in batch),
            do_sample=False,
            logits_processor=[drawer.draw],
            stopping_criteria=[drawer.ended],
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )


class _Drawer:
    """Draws for a batch inside ``generate``; rows that have ended draw on, unrecorded, until all have."""

    def __init__(self, sampler: Sampler, batch: list[RunningSequence], device: torch.device) -> None:
        self.sampler, self.batch = sampler, batch
        self.sampling = SamplingBatch.build(**sampling_columns(batch), device=device)
        self.positions = torch.tensor([len(s.prompt) for s in batch], device=device)
        self.done = [False] * len(batch)

    def draw(self, input_ids: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        drawn = self.sampler.draw(logits_BV, self.sampling, self.positions)
        self.positions += 1
        for row, values in enumerate(drawn.to_host()):
            if not self.done[row]:
                self.done[row] = self.batch[row].accept(*values)
        return torch.full_like(logits_BV, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)

    def ended(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(self.batch),), all(self.done), device=input_ids.device)
