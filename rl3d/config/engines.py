"""What generation engines with a model of their own (hf, vllm) cannot be asked for."""

from typing import Any

from rl3d.config.base import Problem

VLLM_OWNED = {
    "model": "model.path", "tokenizer": "model.tokenizer", "dtype": "model.dtype", "seed": "rollout.seed",
    "tensor_parallel_size": "layout.gen", "pipeline_parallel_size": "layout.gen", "data_parallel_size": "layout.gen",
    "distributed_executor_backend": "layout.gen", "max_model_len": "model.max_sequence_length",
    "max_num_seqs": "rollout.max_sequences", "max_num_batched_tokens": "rollout.max_batch_tokens",
    "load_format": "model.path", "logits_processors": "rollout.temperature, top_p, top_k, min_p",
    "skip_tokenizer_init": "model.tokenizer", "async_scheduling": "nothing, draws are read step by step",
}  # fmt: skip
"""Options of ``vllm.LLM`` that are rl3d's to set, and the key that sets them."""

VLLM_SHARE = 0.5
"""``gpu_memory_utilization`` where nothing else is asked for: vLLM's own default leaves training no room to start in."""

VLLM_CPU_CACHE = 1
"""GiB of vLLM's key/value cache on a CPU (``VLLM_CPU_KVCACHE_SPACE``), likewise."""


def vllm_problems(options: dict[str, Any], device: str) -> list[Problem]:
    """Options that cannot be passed on to ``vllm.LLM`` on ``device`` (cuda, cpu or auto)."""
    if device == "cpu" and options.get("enable_sleep_mode"):
        text = "on a CPU vLLM cannot sleep, its weights and cache stay in memory during training; remove it"
        return [Problem("rollout.vllm.enable_sleep_mode", text, True), *vllm_problems(options, "auto")]
    return [
        Problem(f"rollout.vllm.{name}", f"rl3d sets this itself; remove it and use {VLLM_OWNED[name]}", value)
        for name, value in options.items()
        if name in VLLM_OWNED
    ]


def engine_problems(cfg: Any) -> list[Problem]:
    """Keys of a :class:`rl3d.config.RunConfig` that do not go with its ``rollout.engine``."""
    engine, layout = cfg.rollout.engine, cfg.layout
    problems = vllm_problems(cfg.rollout.vllm, layout.device)
    if cfg.rollout.vllm and engine != "vllm":
        problems.append(
            Problem(
                "rollout.vllm",
                f"rollout.engine = {engine} does not read it; remove it, or set engine=vllm",
                cfg.rollout.vllm,
            )
        )
    if engine == "megatron":
        return problems
    if engine == "hf" and layout.gen_layout.tp > 1:
        text = "rollout.engine = hf runs a whole model on each rank; write tp1, or rollout.engine=megatron"
        problems.append(Problem("layout.gen", text, layout.gen))
    if layout.transport == "peer":
        text = f"weights are streamed in messages, and rollout.engine = {engine}; use auto, or rollout.engine=megatron"
        problems.append(Problem("layout.transport", text, "peer"))
    for key, value, usual, why in (
        ("layout.training_copy", layout.training_copy, "keep", "the dropped weights are rebuilt from the built-in engine's"),
        ("layout.verify", layout.verify, "off", "it compares with the built-in engine's weights"),
        ("rollout.cache_strategy", cfg.rollout.cache_strategy, "adaptive", "it is the built-in engine's cache"),
    ):
        if value != usual:
            text = f"{why}, and rollout.engine = {engine}; use {usual}, or rollout.engine=megatron"
            problems.append(Problem(key, text, value))
    return problems
