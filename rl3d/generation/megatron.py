"""The built-in generator: continuous batching on megatron-core modules with a key/value cache."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from rl3d.generation.body import CPU_MIN_ROWS, Body, make_body
from rl3d.generation.context import GenerationContext
from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Progress, Request, Result
from rl3d.generation.kv_cache import KVCache
from rl3d.generation.sampler import Draw, Sampler, SamplingBatch
from rl3d.generation.scheduler import Admission, RunningSequence, Scheduler, expand


class StaleWeightsError(RuntimeError):
    """The generation weights were never loaded, or are older than the trained ones."""


class MegatronGenerator:
    """Batched sampling from one replica of a model.

    Args:
        model: a whole GPTModel (no pipeline) built with :class:`rl3d.generation.attention.CachedSelfAttention` and an
            explicit process-group collection. Its weights may be replaced in place between calls.
        tp_group: the tensor-parallel group of the replica, or ``None`` for one rank.
        vocab_size: true vocabulary size, without padding.
        max_sequences: sequences that run at once; more wait and fill slots as they become free.
        max_sequence_length: most tokens of a sequence, prompt and response together.
        page_size: tokens a page of the cache; ``None`` takes one page per sequence, the fastest where there is no
            paged kernel.
        pages: pages of the pool; by default every slot can hold the longest sequence.
        max_prefill_tokens: prompt tokens computed in one forward pass.
        body: forward pass, see :func:`rl3d.generation.body.make_body`.

    Attributes:
        weights_version: version of the weights in ``model``; whoever loads weights sets it. ``None``: nothing loaded.
        expected_version: version that generation must have, or ``None`` to accept any.
    """

    def __init__(
        self,
        model: GPTModel,
        tp_group: dist.ProcessGroup | None,
        vocab_size: int,
        *,
        max_sequences: int,
        max_sequence_length: int,
        device: torch.device | str,
        dtype: torch.dtype,
        page_size: int | None = None,
        pages: int | None = None,
        max_prefill_tokens: int = 2048,
        body: str = "auto",
    ) -> None:
        self.model, self.device = model.eval(), torch.device(device)
        self.group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self.vocab_size = vocab_size
        _check_limits(model, max_sequences, max_sequence_length, page_size, pages, max_prefill_tokens)
        self.max_sequences, self.max_prefill_tokens = max_sequences, max_prefill_tokens
        self.min_rows = CPU_MIN_ROWS if self.device.type == "cpu" else 1
        attention = model.decoder.layers[0].self_attention
        self.cache = KVCache(
            len(model.decoder.layers),
            attention.num_query_groups_per_partition,
            attention.hidden_size_per_attention_head,
            max_sequences=max_sequences,
            max_sequence_length=max_sequence_length,
            page_size=max_sequence_length if page_size is None else page_size,
            pages=pages,
            dtype=dtype,
            device=self.device,
        )
        self.context = GenerationContext(self.cache)
        self.body: Body = make_body(model, self.context, self.group, body)
        self.sampler = Sampler(vocab_size, model.vocab_size, self.group, self.device)
        self.weights_version: int | None = None
        self.expected_version: int | None = None

    # ---- memory

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on this rank now; 0 when it is released."""
        return 0 if self.cache.pool is None else self.cache.nbytes

    def allocate_cache(self) -> int:
        """Allocate the cache (``generate`` does when needed); returns the bytes newly allocated."""
        return self.cache.allocate()

    def release_cache(self) -> int:
        """Free the cache, for example while training; returns the bytes freed."""
        return self.cache.deallocate()

    # ---- generation

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], on_finish: OnFinish | None = None, on_step: OnStep | None = None
    ) -> list[Result]:
        """Sample every request; results ordered by (request, sample).

        Collective over the tensor-parallel group: all ranks pass the same requests and get equal results.
        ``on_finish`` receives each result as its sequence ends, ``on_step`` the :class:`Progress` after each step.

        Raises:
            GenerationError: a request that can never be served; nothing has run then.
            StaleWeightsError: the weights are not those expected.
            FloatingPointError: the model returned logits that are not numbers.
        """
        self._check_weights()
        self._check_requests(requests)
        self._check_agreement(requests)
        sequences = expand(requests)
        results = [sequence.result for sequence in sequences]
        finished = tokens = 0

        def finish(ended: Sequence[RunningSequence]) -> None:
            nonlocal finished
            finished += len(ended)
            if on_finish is not None:
                for sequence in ended:
                    on_finish(sequence.result)

        finish([s for s in sequences if s.params.max_new_tokens == 0])
        live = [s for s in sequences if s.params.max_new_tokens > 0]
        scheduler = Scheduler(live, self.cache, self.max_prefill_tokens)
        self.cache.allocate()
        state: _DecodeState | None = None
        try:
            while scheduler.waiting or scheduler.running:
                admission = scheduler.admit()
                if admission is not None:
                    first = len(scheduler.running) - len(admission.prompt_of)
                    draw, state = self._prefill(admission, scheduler.running[first:]), None
                else:
                    first = 0
                    if state is None:
                        state = _DecodeState(scheduler.running, self.body.decode_rows, self.device)
                    draw = self._decode(state)
                ended = self._accept(scheduler, first, draw)
                tokens += draw.tokens.shape[0]
                if ended:
                    state = None
                    finish(scheduler.retire(ended))
                if on_step is not None:
                    on_step(Progress(len(scheduler.waiting), len(scheduler.running), finished, tokens))
        except FloatingPointError:
            self.cache.clear()
            raise
        finally:
            for row in range(len(scheduler.running)):
                self.cache.release(row)
        return results

    def _prefill(self, admission: Admission, sequences: list[RunningSequence]) -> Draw:
        """Compute the distinct prompts, hand copies to their other samples, draw the first token of all."""
        lengths = [len(prompt) for prompt in admission.prompts]
        padding = max(0, self.min_rows - sum(lengths))
        flat = [token for prompt in admission.prompts for token in prompt] + [0] * padding
        self.context.plan_prefill(admission.slots, lengths, padding)
        rows = self.context.last
        short = self.min_rows - len(lengths)
        if short > 0:
            rows = torch.cat([rows, rows[-1:].expand(short)])
        logits = self.body.forward(torch.tensor(flat, device=self.device), rows)
        for source, target, count in admission.copies:
            self.cache.copy(source, target, count)
        if admission.copies:
            logits = logits.index_select(0, torch.tensor(admission.prompt_of, device=self.device))
        else:
            logits = logits[: len(lengths)]
        positions = torch.tensor([s.length for s in sequences], device=self.device)
        return self.sampler.draw(logits, _sampling(sequences, self.device), positions)

    def _decode(self, state: "_DecodeState") -> Draw:
        """One token for every running sequence."""
        self.context.plan_decode(state.positions, state.rows, state.longest)
        logits = self.body.forward(state.tokens, None)[: state.rows]
        state.positions += 1
        state.longest += 1
        draw = self.sampler.draw(logits, state.sampling, state.positions[: state.rows])
        state.tokens[: state.rows] = draw.tokens
        return draw

    def _accept(self, scheduler: Scheduler, first: int, draw: Draw) -> list[int]:
        """Give the drawn tokens to the sequences from slot ``first`` on; slots of those that ended."""
        packed = torch.stack([draw.tokens.double(), draw.logprobs.double(), draw.close.double()])
        ended = []
        for row, (token, logprob, close) in enumerate(zip(*packed.tolist(), strict=True), first):
            sequence = scheduler.running[row]
            if logprob != logprob:
                raise FloatingPointError(
                    f"request {sequence.result.request_index}: the model returned logits that are not numbers at "
                    f"position {sequence.length} (weights version {self.weights_version}); check the weights"
                )
            if sequence.accept(int(token), logprob, bool(close)):
                ended.append(row)
        return ended

    # ---- checks, before anything runs

    def _check_weights(self) -> None:
        if self.weights_version is None:
            raise StaleWeightsError(
                "generation weights were never loaded (weights_version is None); load them and set weights_version"
            )
        if self.expected_version is not None and self.weights_version != self.expected_version:
            raise StaleWeightsError(
                f"generation weights have version {self.weights_version}, expected {self.expected_version}; "
                f"move the trained weights first (switch_to_generation)"
            )

    def _check_requests(self, requests: Sequence[Request]) -> None:
        limit, cache = self.cache.max_sequence_length, self.cache
        for index, request in enumerate(requests):
            prompt, params = request.prompt_ids, request.params
            name = f"request {index} (key {request.key})"
            if not prompt:
                raise GenerationError(f"{name}: the prompt is empty; give at least one token, for example BOS")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                bad = next(t for t in prompt if not 0 <= t < self.vocab_size)
                raise GenerationError(
                    f"{name}: prompt token {bad} is outside the vocabulary of {self.vocab_size}; "
                    f"use the tokenizer of this model"
                )
            need = len(prompt) + params.max_new_tokens
            if need > limit:
                raise GenerationError(
                    f"{name}: prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} = {need} exceeds "
                    f"max_sequence_length {limit}; shorten the prompt, lower max_new_tokens or raise the limit"
                )
            if not cache.contiguous and cache.pages_for(need) > cache.pages:
                raise GenerationError(
                    f"{name}: prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} needs "
                    f"{cache.pages_for(need)} pages of {cache.page_size} tokens, the pool has {cache.pages}; "
                    f"enlarge the pool"
                )

    def _check_agreement(self, requests: Sequence[Request]) -> None:
        """Raise on every rank when the ranks of a replica were asked different things: later it would be a hang."""
        if self.group is None:
            return
        text = repr([(r.prompt_ids, r.key, r.params) for r in requests]).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        mine = torch.tensor([digest], dtype=torch.int64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        digests = [int(part) for part in parts]
        if len(set(digests)) > 1:
            raise GenerationError(
                f"the {len(digests)} tensor-parallel ranks of this replica were given different requests (digests "
                f"{[f'{d:014x}' for d in digests]}); pass the same list on all of them"
            )


def _check_limits(model: GPTModel, max_sequences: int, max_sequence_length: int, page_size: int | None,
                  pages: int | None, max_prefill_tokens: int) -> None:  # fmt: skip
    for name, value in (("max_sequences", max_sequences), ("max_sequence_length", max_sequence_length),
                        ("page_size", page_size), ("pages", pages), ("max_prefill_tokens", max_prefill_tokens)):  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"generator: {name} = {value}, expected at least 1")
    if max_sequence_length > model.max_sequence_length:
        raise ValueError(
            f"generator: max_sequence_length {max_sequence_length} exceeds the {model.max_sequence_length} positions "
            f"that the model knows (max_position_embeddings); lower it"
        )
    if model.config.sequence_parallel:
        raise ValueError(
            "generator: the model was built with sequence_parallel = True, which splits single tokens over ranks; "
            "build the generation model with sequence_parallel=False"
        )
    if not (model.pre_process and model.post_process):
        raise ValueError("generator: the model is one pipeline stage; generation needs all layers (pp = 1)")


class _DecodeState:
    """Tensors of a decode batch; rebuilt when its membership changes, otherwise they stay on the device."""

    def __init__(self, running: list[RunningSequence], min_rows: int, device: torch.device) -> None:
        self.rows = len(running)
        padding = [0] * (min_rows - self.rows)
        self.sampling = _sampling(running, device)
        self.tokens = torch.tensor([s.result.token_ids[-1] for s in running] + padding, device=device)
        # position of the token that goes in, the newest one
        self.positions = torch.tensor([s.length - 1 for s in running] + padding, device=device)
        self.longest = max(s.length for s in running)


def _sampling(sequences: list[RunningSequence], device: torch.device) -> SamplingBatch:
    params = [s.params for s in sequences]
    return SamplingBatch.build(
        [s.noise_key for s in sequences],
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.top_k for p in params],
        device,
    )
