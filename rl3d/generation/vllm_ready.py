"""A vLLM that the user has started: what it must have been started with, and whether it was."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rl3d.generation.engine import GenerationError
from rl3d.generation.vllm_links import Apart, AsyncApart, Here
from rl3d.generation.vllm_start import keep_process_groups
from rl3d.models import Architecture

_DRAWS = "rl3d.generation.vllm_draws:Draws"
_WORKER = "rl3d.generation.vllm_worker.Worker"
_HINT = "start it with LLM(model, ..., **rl3d.vllm_options())"


def vllm_options() -> dict[str, Any]:
    """Options for a ``vllm.LLM`` or ``AsyncEngineArgs`` of your own that an actor shall generate with.

    To be called before vLLM is started: it also asks, in the environment, for vLLM's model runner that knows logits
    processors. Processes, tensor parallelism, memory and lengths are yours to choose; with ``enable_sleep_mode=True``
    (CUDA) it sleeps during training. An engine in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``, or
    ``distributed_executor_backend="external_launcher"``) joins the job that it finds: call
    ``rl3d.distributed.bootstrap.init()`` first.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return {"logits_processors": [_DRAWS], "worker_extension_cls": _WORKER, "async_scheduling": False}


def way_to(engine: Any) -> type[Here]:
    """What a ready engine is reached with.

    Raises:
        GenerationError: it is neither a ``vllm.LLM`` nor an ``AsyncLLM``.
    """
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import InprocClient

    keep_process_groups()
    if isinstance(engine, AsyncLLM):
        return AsyncApart
    if not isinstance(engine, LLM):
        raise GenerationError(
            f"engine is a {type(engine).__name__}; expected a name, a vllm.LLM or an AsyncLLM (AsyncLLMEngine)"
        )
    here = isinstance(engine.llm_engine.engine_core, InprocClient) and _backend(engine.llm_engine.vllm_config) != "mp"
    return Here if here else Apart


def ranks_of(engine: Any) -> int:
    """How many ranks drive a ready engine together: those that its model lies on, or the one that it was started by."""
    if way_to(engine) is Here:
        return engine.llm_engine.vllm_config.parallel_config.tensor_parallel_size
    return 1


def check_ready(found: Here, directory: str | Path, *, tp: int, device: torch.device, dtype: torch.dtype,
                max_sequence_length: int) -> None:  # fmt: skip
    """Raise unless a ready engine runs the model of ``directory`` so that its weights can be replaced and draws are ours.

    Args:
        tp: ranks that drive it together.

    Raises:
        GenerationError: all that does not fit, line by line, each with what to do.
    """
    config = found.config
    model, parallel = config.model_config, config.parallel_config
    problems = _model_problems(model.hf_config, directory)

    def expect(good: Any, what: str, value: Any, fix: str) -> None:
        if not good:
            problems.append(f"{what} = {value}: {fix}")

    expect(model.dtype == dtype, "dtype", model.dtype, f"the actor trains in {dtype}; give both the same dtype")
    expect(model.quantization is None, "quantization", model.quantization, "trained weights are not quantised; leave it out")
    expect(config.lora_config is None, "enable_lora", True, "weights are replaced as a whole; leave it out")
    expect(model.max_model_len >= max_sequence_length, "max_model_len", model.max_model_len, "the actor's sequences have up "
           f"to {max_sequence_length} tokens; raise it, or lower the actor's max_sequence_length")  # fmt: skip
    kind = config.device_config.device_type
    expect(kind == device.type, "device", kind, f"the actor runs on {device.type}; start both on the same kind of device")
    size, apart = parallel.tensor_parallel_size, isinstance(found, Apart)
    if apart:
        expect(tp == 1, "tensor_parallel_size of the actor", tp, "an engine in processes of its own is driven by one rank, "
               "whatever its own tensor_parallel_size; use 1 (gen='tp1'), or start it in the ranks, with "
               "distributed_executor_backend='external_launcher' and VLLM_ENABLE_V1_MULTIPROCESSING=0")  # fmt: skip
        expect(parallel.worker_extension_cls == _WORKER, "worker_extension_cls", repr(parallel.worker_extension_cls),
               f"without it its weights cannot be replaced; {_HINT}")  # fmt: skip
    else:
        expect(size == tp, "tensor_parallel_size", size, f"the actor generates in tp{tp}; use gen='tp{size}', or start it "
               f"with {tp}")  # fmt: skip
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        expect(getattr(parallel, name) == 1, name, getattr(parallel, name), "replicas and stages are not supported; use 1")
    processors = [p if isinstance(p, str) else f"{p.__module__}:{p.__qualname__}" for p in model.logits_processors or ()]
    expect(_DRAWS in processors, "logits_processors", processors, f"rl3d draws the tokens; {_HINT}")
    expect(not config.scheduler_config.async_scheduling, "async_scheduling", True, f"draws are read step by step; {_HINT}")
    expect(not getattr(config, "use_v2_model_runner", False), "VLLM_USE_V2_MODEL_RUNNER", 1, "that runner does not know "
           "such logits processors; set it to 0 before vLLM is imported, as rl3d.vllm_options() does")  # fmt: skip
    if problems:
        raise GenerationError("this vLLM engine cannot generate for the actor:\n" + "\n".join(f"  {p}" for p in problems))


def _backend(config: Any) -> str:
    backend = config.parallel_config.distributed_executor_backend
    return backend if isinstance(backend, str) else "uni" if backend is None else "mp"


def _model_problems(hf_config: Any, directory: str | Path) -> list[str]:
    """How the engine's architecture differs from that of ``directory``."""
    mine, theirs = (asdict(Architecture.from_hf(source)) for source in (directory, hf_config))
    differs = [f"{name} {theirs[name]} ({mine[name]})" for name in mine if theirs[name] != mine[name]]
    if not differs:
        return []
    return [f"model: {', '.join(differs)} differ from the actor's (in brackets), {directory}; start it with that model"]
