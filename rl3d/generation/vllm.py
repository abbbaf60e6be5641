"""Generation with vLLM: vLLM runs the model, its cache and its scheduler; the draws are ours.

A logits processor draws with the stateless noise and leaves only the drawn token, as :mod:`rl3d.generation.hf` does, so
that results mean the same, and with equal logits are the same, as those of the built-in generator: one set of sampling
parameters, tokens that do not depend on batch or ranks, all three log-probabilities.

Started from here, vLLM runs in the job's own processes: it reads the launcher's environment (its ``external_launcher``),
schedules on every rank alike, and cuts its own shards from the whole tensors that it is given. A ready engine may have
processes of its own.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.config import ConfigError
from rl3d.generation.checks import check_agreement, check_requests
from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Progress, Request, Result, check_weights
from rl3d.generation.scheduler import RunningSequence, expand
from rl3d.generation.vllm_links import Here
from rl3d.generation.vllm_start import missing_reason, start, unlink_shared_memory

_ABORT_EVERY = 8  # steps between the ranks of a replica telling each other what to abort


class VLLMGenerator:
    """One replica of a model in vLLM. All tensor-parallel ranks make the same calls.

    Args:
        directory: Hugging Face directory with the model's configuration (and its weights, with ``weights``).
        tp_group: the tensor-parallel group: consecutive global ranks.
        weights: load the directory's weights; otherwise :meth:`load_weights` comes before the first call.
        max_prefill_tokens: tokens of one of vLLM's batches.
        options: of ``vllm.LLM``, for example ``gpu_memory_utilization``; those that rl3d sets are refused.
        ready: a ``vllm.LLM`` or ``AsyncLLM`` that runs already, on each rank its own; it keeps its limits and options
            (:func:`rl3d.vllm_options` says which it needs).

    Attributes:
        llm: the ``vllm.LLM`` or ``AsyncLLM``.
        weights_version, expected_version, tokenizer: see :class:`rl3d.generation.GenerationEngine`.

    Raises:
        ConfigError: an option that is rl3d's to set, or any with ``ready``.
        GenerationError: vLLM is not installed, or ``ready`` does not fit (the message says all that does not).
    """

    def __init__(self, directory: str | Path, tp_group: dist.ProcessGroup | None, *, device: torch.device,
                 dtype: torch.dtype, max_sequences: int, max_sequence_length: int, vocab_size: int,
                 max_prefill_tokens: int | None = None, weights: bool = False,
                 options: Mapping[str, Any] | None = None, ready: Any = None) -> None:  # fmt: skip
        if (reason := missing_reason()) is not None:
            raise GenerationError(f"engine 'vllm': {reason}")
        self.device, self.vocab_size, self.max_sequence_length = device, vocab_size, max_sequence_length
        self.group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        if ready is None:
            self.link = Here(start(
                directory, self.group, device=device, dtype=dtype, max_sequences=max_sequences, weights=weights,
                max_sequence_length=max_sequence_length, max_prefill_tokens=max_prefill_tokens, options=options or {},
            ))  # fmt: skip
        elif options:
            raise ConfigError(f"options of vllm.LLM ({', '.join(options)}) come too late for a ready engine; leave them "
                              f"out, or start it with them")  # fmt: skip
        else:
            from rl3d.generation.vllm_ready import check_ready, way_to

            self.link = way_to(ready)(ready)
            check_ready(self.link, directory, tp=1 if self.group is None else self.group.size(), device=device, dtype=dtype,
                        max_sequence_length=max_sequence_length)  # fmt: skip
            if self.group is not None and device.type == "cpu":
                unlink_shared_memory(self.group)
        self._sleeps = device.type == "cuda" and bool(self.link.config.model_config.enable_sleep_mode)
        self._asleep = {"weights", "kv_cache"} if self._sleeps and self.link.sleeps() else set[str]()
        self.weights_version: int | None = 0 if weights else None
        self.expected_version: int | None = None
        self.tokenizer: Any = None
        self._call = 0
        self._aborted: set[str] = set()
        self._abort_lock = threading.Lock()
        if not weights:  # training comes first
            self._check_idle()
            self.release_cache()

    @property
    def llm(self) -> Any:
        return self.link.llm

    # ---- weights and memory

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`rl3d.generation.engine.FedEngine.load_weights`. vLLM copies module by module, in place.

        Raises:
            GenerationError: a ready engine is at work on requests of others.
        """
        self._check_idle()
        self.weights_version = None
        self._wake("weights")
        self.link.load(tensors)
        self.link.forget_prefixes()  # what is in the cache was computed with the weights before

    def allocate_cache(self) -> int:
        """Wake the cache where vLLM can sleep (CUDA); vLLM decided on its size when it started, so 0 is returned."""
        self._wake("kv_cache")
        return 0

    def release_cache(self) -> int:
        """Put weights and cache to sleep where vLLM can (on CUDA, in sleep mode): both are brought anew. Elsewhere they stay
        where they are. Bytes freed, as the device counts them."""
        if not self._sleeps or self._asleep:
            return 0
        before = torch.cuda.mem_get_info(self.device)[0]
        self.link.sleep(2)  # weights are not kept: the next switch brings them
        self.weights_version = None
        self._asleep = {"weights", "kv_cache"}
        return max(0, torch.cuda.mem_get_info(self.device)[0] - before)

    def _wake(self, what: str) -> None:
        if what in self._asleep:
            self.link.wake(what)
            self._asleep.discard(what)

    def _check_idle(self) -> None:
        if busy := self.link.busy():
            raise GenerationError(f"the ready vLLM engine is at work on {busy} requests that are not the actor's; wait for "
                                  f"them, or abort them, before the actor switches or generates")  # fmt: skip

    # ---- generation

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
        check_agreement(requests, self.group, self.device)
        self._check_idle()
        with self._abort_lock:
            self._aborted.clear()
        sequences = expand(requests, self.tokenizer)
        for sequence in sequences:
            if sequence.params.max_new_tokens == 0 and on_finish is not None:
                on_finish(sequence.result)
        live = self._add([s for s in sequences if s.params.max_new_tokens > 0])
        try:
            self._run(live, len(sequences), on_finish or (lambda _: None), on_step or (lambda _: None))
        finally:
            self._drop(list(live))
        return [s.result for s in sequences]

    def abort(self, request_id: str) -> None:
        """As :meth:`rl3d.generation.MegatronGenerator.abort`."""
        with self._abort_lock:
            self._aborted.add(request_id)

    def _add(self, sequences: Sequence[RunningSequence]) -> dict[str, RunningSequence]:
        """Hand the sequences to vLLM, each under a name of its own."""
        from vllm import SamplingParams

        from rl3d.generation.vllm_draws import request_arguments

        self._call += 1
        live = {f"rl3d-{self._call}-{s.order}": s for s in sequences}
        for name, s in live.items():
            self.link.add(name, s.prompt, SamplingParams(
                temperature=0.0, max_tokens=s.params.max_new_tokens, stop_token_ids=sorted(s.stops), ignore_eos=True,
                detokenize=False, extra_args=request_arguments(name, s),
            ))  # fmt: skip
        return live

    def _run(self, live: dict[str, RunningSequence], total: int, on_finish: OnFinish, on_step: OnStep) -> None:
        drawn, step = 0, 0
        while live:
            ended: list[str] = []
            outputs = [(name, tokens) for name, tokens in self.link.step() if name in live]
            for name, rows in self.link.drawn([name for name, _ in outputs]).items():
                live[name].draws.update(rows)
            for name, tokens in outputs:
                sequence = live[name]
                for token in tokens[len(sequence.result.token_ids) :]:
                    drawn += 1
                    if self._accept(sequence, token):
                        ended.append(name)
                        break
            step += 1
            running = [live[name] for name in ended]
            self._drop(ended)
            for name in ended:
                del live[name]
            for sequence in running:
                on_finish(sequence.result)
            waiting = sum(1 for s in live.values() if not s.result.token_ids)
            on_step(Progress(waiting, len(live) - waiting, total - len(live), drawn))
            for name in self._abort(live, step):
                sequence = live.pop(name)
                sequence.result.finish_reason = "abort"
                on_finish(sequence.result)

    def _accept(self, sequence: RunningSequence, token: int) -> bool:
        """Record a token with the numbers that were drawn with it; whether the sequence ends."""
        position = sequence.length
        row = sequence.draws.pop(position, None)
        if row is None:
            raise RuntimeError(
                f"vLLM returned token {token} at position {position}, which rl3d's logits processor did not draw"
            )
        if any(x != x for x in row):
            raise FloatingPointError(
                f"request {sequence.result.request_index}: vLLM returned logits that are not numbers at position "
                f"{position} (weights version {self.weights_version}); check the weights"
            )
        if row[0] != token:
            raise RuntimeError(f"vLLM returned token {token} at position {position} of a sequence where {row[0]} was drawn")
        return sequence.accept(*row)

    def _abort(self, live: Mapping[str, RunningSequence], step: int) -> list[str]:
        """Names to end now. Collective now and then: all ranks of a replica must do it in one step."""
        if self.group is not None and step % _ABORT_EVERY:
            return []
        with self._abort_lock:
            asked, self._aborted = self._aborted, set()
        if self.group is not None:
            told: list[set[str]] = [set()] * self.group.size()
            dist.all_gather_object(told, asked, group=self.group)
            asked = set().union(*told)
        names = [name for name, s in live.items() if s.result.request_id in asked]
        self._drop(names)
        return names

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self.link.abort(names)  # those that ended already are left alone
            self.link.drawn(names)  # and what was drawn of them ahead of its time is of no use
