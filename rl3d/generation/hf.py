"""Generation with ``model.generate()`` of transformers: any Hugging Face causal model on one device.

transformers runs the model and its cache; the draws are ours. A logits processor draws with the stateless noise and
leaves only the drawn token, so that results mean the same, and with equal logits are the same, as those of the
built-in generator.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl3d.generation.checks import check_requests
from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Progress, Request, Result, check_weights
from rl3d.generation.sampler import Sampler, SamplingBatch
from rl3d.generation.scheduler import RunningSequence, expand, sampling_columns


class HFGenerator:
    """Batches of left-padded prompts through ``model.generate()``.

    Args:
        model: a transformers causal language model, unsharded, on its device.
        max_sequences: prompts a batch; a batch ends with its longest sequence.
        max_sequence_length: most tokens of a sequence, prompt and response; by default what the model knows.

    Attributes:
        weights_version, expected_version, tokenizer: see :class:`rl3d.generation.GenerationEngine`.
    """

    def __init__(self, model: Any, *, max_sequences: int = 16, max_sequence_length: int | None = None) -> None:
        self.model, self.max_sequences = model, max_sequences
        self.device = model.device
        self.vocab_size = model.config.vocab_size
        known = getattr(model.config, "max_position_embeddings", None) or 1 << 62
        self.max_sequence_length = known if max_sequence_length is None else max_sequence_length
        self.sampler = Sampler(self.vocab_size, self.vocab_size, None, self.device)
        self.weights_version: int | None = 0
        self.expected_version: int | None = None
        self.tokenizer: Any = None
        self._aborted: set[str] = set()
        self._abort_lock = threading.Lock()

    @classmethod
    def empty(cls, directory: str | Path, *, device: torch.device, dtype: torch.dtype, **options: Any) -> "HFGenerator":
        """The model of a Hugging Face directory without its weights: :meth:`load_weights` before the first call."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        generator = cls(model.to(device).eval(), **options)
        generator.weights_version = None
        return generator

    # ---- weights and memory

    @torch.no_grad()
    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`rl3d.generation.engine.FedEngine.load_weights`."""
        self.weights_version = None
        parameters = dict(self.model.named_parameters())  # a tied head is not among them
        missing = set(parameters)
        for name, value in tensors:
            if name not in parameters:
                raise GenerationError(
                    f"weights for engine 'hf': the model has no parameter {name!r}; it is no copy of this one"
                )
            parameters[name].copy_(value)
            missing.discard(name)
        if missing:
            raise GenerationError(f"weights for engine 'hf': {len(missing)} never came, {sorted(missing)[:4]} among them")

    def allocate_cache(self) -> int:
        """0: transformers allocates its cache batch by batch."""
        return 0

    def release_cache(self) -> int:
        """0: it is gone with the last batch."""
        return 0

    # ---- generation

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], on_finish: OnFinish | None = None, on_step: OnStep | None = None
    ) -> list[Result]:
        """As :meth:`rl3d.generation.engine.GenerationEngine.generate`.

        Raises:
            GenerationError: a request that can never be served; nothing has run then.
            StaleWeightsError: the weights are not those expected.
        """
        check_weights(self.weights_version, self.expected_version)
        check_requests(requests, self.vocab_size, self.max_sequence_length, 1, None)
        sequences = expand(requests, self.tokenizer)
        with self._abort_lock:
            self._aborted.clear()
        training = self.model.training
        self.model.eval()
        try:
            self._run_all(sequences, on_finish or (lambda _: None), on_step or (lambda _: None))
        finally:
            self.model.train(training)
        return [s.result for s in sequences]

    def abort(self, request_id: str) -> None:
        """As :meth:`rl3d.generation.MegatronGenerator.abort`."""
        with self._abort_lock:
            self._aborted.add(request_id)

    def _run_all(self, sequences: list[RunningSequence], on_finish: OnFinish, on_step: OnStep) -> None:
        finished, tokens = 0, 0

        def finish(sequence: RunningSequence) -> None:
            nonlocal finished
            finished += 1
            on_finish(sequence.result)

        def step(waiting: int, drawn: int) -> None:
            nonlocal tokens
            tokens += drawn
            on_step(Progress(waiting, len(sequences) - waiting - finished, finished, tokens))

        for sequence in sequences:
            if sequence.params.max_new_tokens == 0:
                finish(sequence)
        wanted = [s for s in sequences if s.params.max_new_tokens > 0]
        for start in range(0, len(wanted), self.max_sequences):
            batch = wanted[start : start + self.max_sequences]
            waiting = len(wanted) - start - len(batch)
            alive = [s for s in batch if not self._end_aborted(s, finish)]
            if alive:
                self._run(alive, finish, partial(step, waiting))

    def _end_aborted(self, sequence: RunningSequence, finish: Callable[[RunningSequence], None]) -> bool:
        with self._abort_lock:
            if sequence.result.request_id not in self._aborted:
                return False
        sequence.result.finish_reason = "abort"
        finish(sequence)
        return True

    def _run(self, batch: list[RunningSequence], finish: Callable[[RunningSequence], None],
             step: Callable[[int], None]) -> None:  # fmt: skip
        width = max(len(s.prompt) for s in batch)
        padded = [[0] * (width - len(s.prompt)) + s.prompt for s in batch]
        mask = [[0] * (width - len(s.prompt)) + [1] * len(s.prompt) for s in batch]
        sampling = SamplingBatch.build(**sampling_columns(batch), device=self.device)
        positions = torch.tensor([len(s.prompt) for s in batch], device=self.device)
        done = [False] * len(batch)

        def draw(input_ids: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
            """Rows that have ended draw on, unrecorded, until all have."""
            drawn = self.sampler.draw(logits_BV, sampling, positions)
            positions.add_(1)
            alive = [row for row, ended in enumerate(done) if not ended]
            rows = drawn.to_host()
            for row in alive:
                if any(x != x for x in rows[row]):
                    raise FloatingPointError(
                        f"request {batch[row].result.request_index}: the model returned logits that are not numbers at "
                        f"position {batch[row].length} (weights version {self.weights_version}); check the weights"
                    )
                done[row] = batch[row].accept(*rows[row])
                if done[row]:
                    finish(batch[row])
            step(len(alive))
            for row in alive:
                done[row] = done[row] or self._end_aborted(batch[row], finish)
            return torch.full_like(logits_BV, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)

        def ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(batch),), all(done), device=input_ids.device)

        self.model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max(s.params.max_new_tokens for s in batch),
            do_sample=False,
            logits_processor=[draw],
            stopping_criteria=[ended],
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )
