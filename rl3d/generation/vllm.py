"""Generation with vLLM, in the same processes: vLLM runs the model, its cache and its scheduler; the draws are ours.

A logits processor draws with the stateless noise and leaves only the drawn token, as :mod:`rl3d.generation.hf` does, so
that results mean the same, and with equal logits are the same, as those of the built-in generator: one set of sampling
parameters, tokens that do not depend on batch or ranks, all three log-probabilities.

vLLM reads the launcher's environment (its ``external_launcher``), schedules on every rank alike, and cuts its own shards
from the whole tensors that it is given.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.config import ConfigError
from rl3d.config.engines import vllm_problems
from rl3d.generation.checks import check_agreement, check_requests
from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Progress, Request, Result, check_weights
from rl3d.generation.scheduler import RunningSequence, expand

_ABORT_EVERY = 8  # steps between the ranks of a replica telling each other what to abort


def missing_reason() -> str | None:
    """Why vLLM cannot be used here; ``None`` when it can."""
    try:
        import vllm  # noqa: F401
    except Exception as error:  # its compiled parts fail in many ways
        return f"vLLM cannot be imported ({type(error).__name__}: {error}); install it, or use engine 'megatron'"
    return None


class VLLMGenerator:
    """One replica of a model in vLLM. All tensor-parallel ranks make the same calls.

    Args:
        directory: Hugging Face directory with the model's configuration (and its weights, with ``weights``).
        tp_group: the tensor-parallel group: consecutive global ranks.
        weights: load the directory's weights; otherwise :meth:`load_weights` comes before the first call.
        max_prefill_tokens: tokens of one of vLLM's batches.
        options: of ``vllm.LLM``, for example ``gpu_memory_utilization``; those that rl3d sets are refused.

    Attributes:
        llm: the ``vllm.LLM``.
        weights_version, expected_version, tokenizer: see :class:`rl3d.generation.GenerationEngine`.

    Raises:
        ConfigError: an option that is rl3d's to set.
        GenerationError: vLLM is not installed.
    """

    def __init__(self, directory: str | Path, tp_group: dist.ProcessGroup | None, *, device: torch.device,
                 dtype: torch.dtype, max_sequences: int, max_sequence_length: int, vocab_size: int,
                 max_prefill_tokens: int | None = None, weights: bool = False,
                 options: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        options = dict(options or {})
        if problems := vllm_problems(options):
            raise ConfigError(problems)
        if (reason := missing_reason()) is not None:
            raise GenerationError(f"engine 'vllm': {reason}")
        _environment(device)
        from vllm import LLM

        from rl3d.generation.vllm_draws import Draws

        self.device, self.vocab_size, self.max_sequence_length = device, vocab_size, max_sequence_length
        self.group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        usual: dict[str, Any] = {"enforce_eager": True, "block_size": 32} if device.type == "cpu" else {}
        usual |= {"enable_sleep_mode": device.type == "cuda", "enable_prefix_caching": True}
        if max_prefill_tokens is not None:
            usual["max_num_batched_tokens"] = max(max_prefill_tokens, max_sequence_length)
        with _shared_memory_of_its_own(self.group, device):
            self.llm = LLM(
                str(directory), skip_tokenizer_init=True, dtype=str(dtype).removeprefix("torch."), seed=0,
                tensor_parallel_size=1 if self.group is None else self.group.size(),
                distributed_executor_backend="external_launcher", max_model_len=max_sequence_length,
                max_num_seqs=max_sequences, load_format="auto" if weights else "dummy", logits_processors=[Draws],
                async_scheduling=False, **usual | options,
            )  # fmt: skip
        self._sleeps = bool((usual | options)["enable_sleep_mode"])
        self._asleep: set[str] = set()
        self.weights_version: int | None = 0 if weights else None
        self.expected_version: int | None = None
        self.tokenizer: Any = None
        self._call = 0
        self._aborted: set[str] = set()
        self._abort_lock = threading.Lock()

    # ---- weights and memory

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`rl3d.generation.engine.FedEngine.load_weights`. vLLM copies module by module, in place."""
        self.weights_version = None
        self._wake("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _settled(tensors)})
        if self.device.type == "cpu":
            self.llm.apply_model(_pack_embeddings)
        self.llm.reset_prefix_cache()  # what is in it was computed with the weights before

    def allocate_cache(self) -> int:
        """Wake the cache where vLLM can sleep (CUDA); vLLM decided on its size when it started, so 0 is returned."""
        self._wake("kv_cache")
        return 0

    def release_cache(self) -> int:
        """Put weights and cache to sleep where vLLM can: both are brought anew. Bytes freed, as the device counts them."""
        if not self._sleeps or self._asleep:
            return 0
        before = torch.cuda.mem_get_info(self.device)[0]
        self.llm.sleep(level=2)  # weights are not kept: the next switch brings them
        self.weights_version = None
        self._asleep = {"weights", "kv_cache"}
        return max(0, torch.cuda.mem_get_info(self.device)[0] - before)

    def _wake(self, what: str) -> None:
        if what in self._asleep:
            self.llm.wake_up(tags=[what])
            self._asleep.discard(what)

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

        from rl3d.generation.vllm_draws import SEQUENCES

        self._call += 1
        live = {f"{self._call}-{s.order}": s for s in sequences}
        for name, s in live.items():
            SEQUENCES[name] = s
            params = SamplingParams(
                temperature=0.0, max_tokens=s.params.max_new_tokens, stop_token_ids=sorted(s.stops), ignore_eos=True,
                detokenize=False, extra_args={"rl3d": name},
            )  # fmt: skip
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": s.prompt}, params)
        return live

    def _run(self, live: dict[str, RunningSequence], total: int, on_finish: OnFinish, on_step: OnStep) -> None:
        engine = self.llm.llm_engine
        drawn, step = 0, 0
        while live:
            ended: list[str] = []
            for output in engine.step():
                name = output.request_id
                sequence = live.get(name)
                if sequence is None:
                    continue
                known = len(sequence.result.token_ids)
                for token in list(output.outputs[0].token_ids)[known:]:
                    drawn += 1
                    if self._accept(sequence, int(token)):
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
        row = sequence.draws.pop(position)
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
        from rl3d.generation.vllm_draws import SEQUENCES

        if names:
            self.llm.llm_engine.abort_request(list(names))  # those that ended already are left alone
        for name in names:
            SEQUENCES.pop(name, None)


def _pack_embeddings(model: torch.nn.Module) -> None:
    """On a CPU vLLM computes logits from a packed copy of the output projection. Of an embedding that is both it keeps the
    copy of the weights before."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _settled(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that stay as long as vLLM keeps them: until a module's last one has come, an embedding that it pads until
    the very end."""
    for name, value in tensors:
        yield name, value.clone()


@contextlib.contextmanager
def _shared_memory_of_its_own(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """On a CPU vLLM names the shared memory of a tensor-parallel group after how its ranks meet. Under a launcher that is
    the same for every engine, and the second one finds the first one's memory; here each gets a name."""
    if group is None or device.type != "cpu":
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    name = [f"rl3d-{secrets.token_hex(6)}"]
    dist.broadcast_object_list(name, group=group, group_src=0)
    meet = Executor._distributed_args
    Executor._distributed_args = lambda self: (f"env://{name[0]}", *meet(self)[1:])
    try:
        yield
    finally:
        Executor._distributed_args = meet


def _environment(device: torch.device) -> None:
    """What vLLM reads from the environment when it is imported and started; what is set already stays."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    usual = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one has no logits processors of others
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # iterators of weights are handed over inside this process
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    if device.type == "cpu":
        usual |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":  # a launcher may show each rank one device only, whatever its local rank
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if device.index is None else device.index)
