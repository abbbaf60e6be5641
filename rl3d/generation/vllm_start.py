"""How vLLM is started in the processes of a job: its environment, its options, and shared memory of its own."""

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.config import ConfigError
from rl3d.config.engines import VLLM_CPU_CACHE, VLLM_SHARE, vllm_problems


def missing_reason() -> str | None:
    """Why vLLM cannot be used here; ``None`` when it can."""
    try:
        import vllm  # noqa: F401
    except Exception as error:  # its compiled parts fail in many ways
        return f"vLLM cannot be imported ({type(error).__name__}: {error}); install it, or use engine 'megatron'"
    return None


def start(directory: str | Path, group: dist.ProcessGroup | None, *, device: torch.device, dtype: torch.dtype,
          max_sequences: int, max_sequence_length: int, max_prefill_tokens: int | None, weights: bool,
          options: Mapping[str, Any]) -> Any:  # fmt: skip
    """A ``vllm.LLM`` in this process, on the ranks of ``group``. Arguments as :class:`rl3d.generation.VLLMGenerator`'s.

    Raises:
        ConfigError: options that are rl3d's to set, or that this device has not.
    """
    if problems := vllm_problems(dict(options), device.type):
        raise ConfigError(problems)
    set_environment(device)
    from vllm import LLM

    from rl3d.generation.vllm_draws import Draws

    keep_process_groups()

    usual: dict[str, Any] = {"enforce_eager": True, "block_size": 32} if device.type == "cpu" else {}
    usual |= {"enable_sleep_mode": device.type == "cuda", "enable_prefix_caching": True,
              "gpu_memory_utilization": VLLM_SHARE}  # fmt: skip
    if max_prefill_tokens is not None:
        usual["max_num_batched_tokens"] = max(max_prefill_tokens, max_sequence_length)
    with _shared_memory_of_its_own(group, device):
        return LLM(
            str(directory), skip_tokenizer_init=True, dtype=str(dtype).removeprefix("torch."), seed=0,
            tensor_parallel_size=1 if group is None else group.size(),
            distributed_executor_backend="external_launcher", max_model_len=max_sequence_length,
            max_num_seqs=max_sequences, load_format="auto" if weights else "dummy", logits_processors=[Draws],
            async_scheduling=False, **usual | dict(options),
        )  # fmt: skip


def set_environment(device: torch.device) -> None:
    """What vLLM reads from the environment when it is imported and started; what is set already stays."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    usual = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of what is meant so, at each switch of every module without weights
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one has no logits processors of others
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # iterators of weights are handed over inside this process
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    if device.type == "cpu":
        usual |= {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_CPU_CACHE), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":  # a launcher may show each rank one device only, whatever its local rank
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if device.index is None else device.index)


def keep_process_groups() -> None:
    """vLLM ends torch.distributed, and the groups that its engines share, whenever an engine in this process goes. The job
    and other engines go on with them."""
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = _free_memory


def _free_memory(*_: Any, **__: Any) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _shared_memory_of_its_own(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """On a CPU vLLM names the shared memory of a tensor-parallel group after how its ranks meet. Under a launcher that is
    the same for every engine, and the second one finds the first one's memory; here each gets a name, and leaves no file."""
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
        unlink_shared_memory(group)
    finally:
        Executor._distributed_args = meet


def unlink_shared_memory(group: dist.ProcessGroup) -> None:
    """Take away the name of what vLLM's newest engine shares on a CPU, which all of its ranks have mapped by now: it would
    outlive the job, and an engine of that name could not start."""
    name = os.environ.get("VLLM_DIST_IDENT", "").lstrip("/")
    for file in Path("/dev/shm").glob(f"{name}-*-cpushm_{group.rank()}"):
        file.unlink(missing_ok=True)
