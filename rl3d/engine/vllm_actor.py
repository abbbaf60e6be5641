"""``VLLMActor``: an actor whose rollouts vLLM samples."""

from typing import Any

from rl3d.engine.actor import Actor


class VLLMActor(Actor):
    """An :class:`Actor` that generates with vLLM; every switch to generation brings vLLM the trained weights.

    Args:
        model_name: as ``Actor``'s ``model``.
        tensor_parallel_size: of vLLM, in the ranks' own processes; the other ranks become replicas. Of a ready engine, the
            ranks that drive it: by default those that its model lies on, one for an engine with processes of its own.
        gpu_memory_utilization: share of each GPU that vLLM may take for its weights and cache (0.5); both sleep during
            training. On a CPU vLLM cannot sleep: weights and cache stay in memory.
        llm: a ready engine to generate with, a ``vllm.LLM`` or an ``AsyncLLM``, on each rank that generates its own; started
            with :func:`rl3d.vllm_options`, from the same model and in the same dtype. It sleeps if it was started with
            ``enable_sleep_mode``, and is yours to shut down.
        vllm: other options of ``vllm.LLM``.
        settings: of :class:`Actor`.

    Raises:
        GenerationError: vLLM is not installed, or ``llm`` does not fit (the message says what does not, and how to mend it).
        ConfigError: an option in ``vllm`` that is rl3d's to set, or any beside ``llm``.
    """

    def __new__(cls, model_name: Any, *args: Any, num_gpus: int | None = None, **settings: Any) -> Any:
        return super().__new__(cls, model_name, num_gpus=num_gpus, **_settings(*args, **settings))

    def __init__(self, model_name: Any, *args: Any, num_gpus: int | None = None, **settings: Any) -> None:
        super().__init__(model_name, num_gpus=num_gpus, **_settings(*args, **settings))

    @property
    def llm(self) -> Any:
        """The ``vllm.LLM`` or ``AsyncLLM`` of this rank, ``None`` where it does not generate."""
        return getattr(self.hybrid.side.generator, "llm", None)


def _settings(tensor_parallel_size: int | None = None, gpu_memory_utilization: float | None = None, *, llm: Any = None,
              vllm: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:  # fmt: skip
    options = dict(vllm or {})
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    if llm is not None and tensor_parallel_size is None:
        from rl3d.generation.vllm_ready import ranks_of

        tensor_parallel_size = ranks_of(llm)
    engine = "vllm" if llm is None else llm
    return {"gen": f"tp{tensor_parallel_size or 1}", "engine": engine, "engine_options": options, **settings}
