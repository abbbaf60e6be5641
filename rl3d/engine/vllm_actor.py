"""``VLLMActor``: an actor whose rollouts vLLM samples."""

from typing import Any

from rl3d.engine.actor import Actor


class VLLMActor(Actor):
    """An :class:`Actor` that generates with vLLM, in the same processes; every switch brings vLLM the trained weights.

    Args:
        model_name: as ``Actor``'s ``model``.
        tensor_parallel_size: of vLLM; the other ranks become replicas.
        gpu_memory_utilization: share of each GPU that vLLM may take for its weights and cache; both sleep during
            training.
        vllm: other options of ``vllm.LLM``.
        settings: of :class:`Actor`.

    Raises:
        GenerationError: vLLM is not installed.
        ConfigError: an option in ``vllm`` that is rl3d's to set.
    """

    def __new__(cls, model_name: Any, *args: Any, num_gpus: int | None = None, **settings: Any) -> Any:
        return super().__new__(cls, model_name, num_gpus=num_gpus, **_settings(*args, **settings))

    def __init__(self, model_name: Any, *args: Any, num_gpus: int | None = None, **settings: Any) -> None:
        super().__init__(model_name, num_gpus=num_gpus, **_settings(*args, **settings))

    @property
    def llm(self) -> Any:
        """The ``vllm.LLM`` of this rank, ``None`` where it does not generate."""
        return getattr(self.hybrid._generator, "llm", None)


def _settings(tensor_parallel_size: int = 1, gpu_memory_utilization: float = 0.5, *, vllm: dict[str, Any] | None = None,
              **settings: Any) -> dict[str, Any]:  # fmt: skip
    options = {"gpu_memory_utilization": gpu_memory_utilization, **(vllm or {})}
    return {"gen": f"tp{tensor_parallel_size}", "engine": "vllm", "engine_options": options, **settings}
