"""The built-in generator: continuous batching on megatron-core modules with a paged key/value cache."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from rl3d.estimate.rollout import PAGE_SIZE
from rl3d.generation.body import CPU_MIN_ROWS, Body, make_body
from rl3d.generation.checks import check_agreement, check_limits, check_requests
from rl3d.generation.context import GenerationContext
from rl3d.generation.decode import BlockTable
from rl3d.generation.engine import OnFinish, OnStep, Progress, Request, Result, check_weights
from rl3d.generation.fused import DecodeBody, reason_against
from rl3d.generation.graphs import DecodeRunner
from rl3d.generation.provision import Provision
from rl3d.generation.sampler import Sampler
from rl3d.generation.scheduler import Counts, RunningSequence, Scheduler, expand
from rl3d.generation.steps import Steps

_ABORT_EVERY = 8  # steps between the ranks of a replica telling each other what to abort


class MegatronGenerator:
    """Batched sampling from one replica of a model.

    Args:
        model: a whole GPTModel (no pipeline) built with :class:`rl3d.generation.attention.CachedSelfAttention` and an
            explicit process-group collection. Its weights may be replaced in place between calls.
        tp_group: the tensor-parallel group of the replica, or ``None`` for one rank.
        vocab_size: true vocabulary size, without padding.
        max_sequences: sequences that run at once; more wait.
        max_sequence_length: most tokens of a sequence, prompt and response together.
        page_size: tokens a page of the cache.
        cache_strategy: how large the pool is and how long it lives, see :mod:`rl3d.generation.sizing`. When there are
            fewer pages than sequences want, they give way to older ones and are computed again.
        pages: pages of the pool, for a fixed number of them.
        max_prefill_tokens: prompt tokens computed in one forward pass; longer prompts take several.
        share_prefixes: use the pages of prompts seen before again, within one version of the weights.
        body: forward pass, see :func:`rl3d.generation.body.make_body`.
        fused: decode with :class:`rl3d.generation.graphs.DecodeRunner` (fused kernels, CUDA graphs); ``None``: on
            CUDA, where it knows the model and no other body was asked for.

    Attributes:
        weights_version: version of the weights in ``model``; whoever loads weights sets it. ``None``: nothing loaded.
        expected_version: version that generation must have, or ``None`` to accept any.
        tokenizer: see :class:`rl3d.generation.GenerationEngine`.
        counts: what the last call cost.
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
        cache_strategy: str = "adaptive",
        pages: int | None = None,
        max_prefill_tokens: int = 2048,
        share_prefixes: bool = True,
        body: str = "auto",
        fused: bool | None = None,
    ) -> None:
        self.model, self.device = model.eval(), torch.device(device)
        self.group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self.vocab_size = vocab_size
        check_limits(model, max_sequences, max_sequence_length, page_size, pages, max_prefill_tokens)
        self.max_sequences, self.max_sequence_length = max_sequences, max_sequence_length
        self.max_prefill_tokens, self.share_prefixes = max_prefill_tokens, share_prefixes
        self.min_rows = CPU_MIN_ROWS if self.device.type == "cpu" else 1
        attention = model.decoder.layers[0].self_attention
        page_size = page_size or PAGE_SIZE[self.device.type]
        columns = -(-max_sequence_length // page_size)
        self.provision = Provision(
            cache_strategy, pages, page_size=page_size, max_sequences=max_sequences, longest=max_sequence_length,
            layers=len(model.decoder.layers), kv_heads=attention.num_query_groups_per_partition,
            head_dim=attention.hidden_size_per_attention_head, dtype=dtype, device=self.device, group=self.group,
        )  # fmt: skip
        self.pool, self.cache = self.provision.pool, self.provision.cache
        self.context = GenerationContext(self.cache, max_sequence_length)
        self.body: Body = make_body(model, self.context, self.group, body)
        self.sampler = Sampler(vocab_size, model.vocab_size, self.group, self.device)
        self.table = BlockTable(max_sequences, columns, self.device)
        self.runner = self._make_runner(fused if fused is not None or body == "auto" else False)
        self.weights_version: int | None = None
        self.expected_version: int | None = None
        self.tokenizer: Any = None
        self.counts = Counts()
        self._last_needs: list[int] = []
        self._pages_version: int | None = None  # of the weights that the kept pages were computed with
        self._aborted: set[str] = set()
        self._abort_lock = threading.Lock()

    def _make_runner(self, wanted: bool | None) -> DecodeRunner | None:
        reason = reason_against(self.model, 1 if self.group is None else self.group.size())
        if wanted and reason:
            raise ValueError(f"fused decoding cannot compute this model: {reason}; leave fused = None")
        if reason or not (self.device.type == "cuda" if wanted is None else wanted):
            return None
        body = DecodeBody(self.model, self.cache, self.group, self.max_sequence_length)
        return DecodeRunner(body, self.sampler, self.cache, self.table.tensor)

    # ---- memory

    @property
    def cache_strategy(self) -> str:
        """How large the cache is and how long it lives; :meth:`set_strategy` changes it."""
        return self.provision.strategy

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on this rank now; 0 when it is released."""
        return self.cache.nbytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that torch keeps for captured decode steps on this rank, while training too; 0 without them."""
        return 0 if self.runner is None else self.runner.graph_bytes

    def allocate_cache(self) -> int:
        """Allocate the cache as far as it is known what will be needed; returns the bytes newly allocated.

        With ``full`` that is all of it, otherwise what the last batch took. Collective over the replica.
        """
        return self.provision.provide(self._last_needs)

    def release_cache(self) -> int:
        """Free the cache while training (with ``full`` it stays, and its contents are forgotten); the bytes freed.

        Captured decode steps stay as long as the cache keeps its address, and so does what they compute in:
        :attr:`graph_bytes`.
        """
        if self.provision.stays:
            self.pool.forget()
            return 0
        return self._free_cache()

    def drop_cache(self) -> int:
        """Free the cache, whatever the strategy, and captured steps with it; the bytes of the cache."""
        if self.runner is not None:
            self.runner.forget()
        return self._free_cache()

    def set_strategy(self, strategy: str) -> None:
        """Another strategy of the cache from now on. The cache of before is freed."""
        self._free_cache()
        self.provision.strategy = strategy

    def _free_cache(self) -> int:
        if self.runner is not None and self.cache.elastic is None:  # graphs of addresses that do not come back
            self.runner.forget()
        return self.provision.free()

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
        check_weights(self.weights_version, self.expected_version)
        check_requests(requests, self.vocab_size, self.max_sequence_length, self.pool.page_size, self.provision.fixed_pages)
        check_agreement(requests, self.group, self.device)
        sequences = expand(requests, self.tokenizer)
        finished = 0

        def finish(ended: Sequence[RunningSequence]) -> None:
            nonlocal finished
            finished += len(ended)
            if on_finish is not None:
                for sequence in ended:
                    on_finish(sequence.result)

        with self._abort_lock:
            self._aborted.clear()
        finish([s for s in sequences if s.params.max_new_tokens == 0])
        scheduler = Scheduler(
            [s for s in sequences if s.params.max_new_tokens > 0], self.pool, max_sequences=self.max_sequences,
            max_prefill_tokens=self.max_prefill_tokens, share_prefixes=self.share_prefixes,
        )  # fmt: skip
        self.counts = scheduler.counts
        if self._pages_version != self.weights_version:
            self.pool.forget()
            self._pages_version = self.weights_version
        self._last_needs = [len(s.prompt) + s.params.max_new_tokens for s in scheduler.waiting]
        if self._last_needs:
            self.provision.provide(self._last_needs)
        steps = Steps(self, scheduler)
        step = 0
        try:
            while scheduler.unfinished:
                finish(steps.advance(look_ahead=not self._waits(step + 1)))
                step += 1
                if on_step is not None:
                    running = len(sequences) - finished - len(scheduler.waiting)
                    on_step(Progress(len(scheduler.waiting), running, finished, scheduler.counts.drawn))
                if not steps.ahead:
                    finish(self._abort(scheduler, step))
        except FloatingPointError:
            self.cache.clear()
            raise
        finally:
            if scheduler.unfinished:  # it did not end well: pages may have been published and not computed
                scheduler.release_all()
                self.pool.forget()
            if self.cache_strategy == "lightweight":
                self.release_cache()
        return [s.result for s in sequences]

    def abort(self, request_id: str) -> None:
        """End a request of the running call; its samples keep what they have and finish with ``"abort"``.

        From a callback or another thread; one rank of a replica is enough. It takes effect between two of the next
        steps. A request that has ended, or is not known, is left alone.
        """
        with self._abort_lock:
            self._aborted.add(request_id)

    def _abort(self, scheduler: Scheduler, step: int) -> list[RunningSequence]:
        """Take out what was to be aborted. Collective now and then: all ranks of a replica must do it in one step."""
        if self.group is not None and step % _ABORT_EVERY:
            return []
        with self._abort_lock:
            names, self._aborted = self._aborted, set()
        if self.group is not None:
            any_names = torch.tensor([len(names)], device=self.device)
            dist.all_reduce(any_names, group=self.group)
            if int(any_names):
                told: list[set[str]] = [set()] * self.group.size()
                dist.all_gather_object(told, names, group=self.group)
                names = set().union(*told)
        if not names:
            return []
        aborted = scheduler.abort(lambda sequence: sequence.result.request_id in names)
        for sequence in aborted:
            sequence.result.finish_reason = "abort"
        return aborted

    def _waits(self, step: int) -> bool:
        """Whether the draw of step number ``step`` must be read before the next starts, because some may be aborted."""
        return bool(self._aborted) if self.group is None else step % _ABORT_EVERY == 0  # alike on all ranks
