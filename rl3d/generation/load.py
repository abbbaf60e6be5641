"""Generation engines by name, from a directory with weights; no training engine around them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl3d.distributed.groups import ModelGroups
from rl3d.generation.engine import FedEngine, GenerationEngine

ENGINES = ("megatron", "hf", "vllm")


def engine_problem(name: str, tp: int) -> str | None:
    """Why engine ``name`` cannot run on ``tp`` tensor-parallel ranks; ``None`` when it can."""
    if name not in ENGINES:
        return f"generation engine {name!r}: expected one of {', '.join(ENGINES)}"
    if name == "hf" and tp > 1:
        return f"engine 'hf' runs a whole model on one rank, tp is {tp}; use tp1, or engine 'megatron'"
    return None


def chosen_engine(engine: Any, use_vllm: bool | None) -> tuple[str, Any]:
    """(name, ready engine or ``None``) of an actor's two arguments.

    Raises:
        ValueError: they contradict each other.
    """
    ready = None if engine is None or isinstance(engine, str) else engine
    name = engine if ready is None else "vllm"
    if use_vllm is None:
        return name or "megatron", ready
    if name is not None and use_vllm != (name == "vllm"):
        raise ValueError(f"use_vllm = {use_vllm} and engine = {engine!r} contradict each other; leave one of them out")
    return name or ("vllm" if use_vllm else "megatron"), ready


def make_fed_engine(name: str, directory: str | Path, groups: ModelGroups, *, device: torch.device, dtype: torch.dtype,
                    max_sequences: int, max_sequence_length: int, vocab_size: int, max_prefill_tokens: int | None = None,
                    options: Mapping[str, Any] | None = None, ready: Any = None) -> FedEngine:  # fmt: skip
    """An engine with a model of its own and no weights yet. Collective over all ranks that generate.

    ``options`` are those of ``vllm.LLM``; ``ready`` is one that runs already.
    """
    limits: dict[str, Any] = {"max_sequences": max_sequences, "max_sequence_length": max_sequence_length}
    if name == "hf":
        from rl3d.generation.hf import HFGenerator

        return HFGenerator.empty(directory, device=device, dtype=dtype, **limits)
    from rl3d.generation.vllm import VLLMGenerator

    return VLLMGenerator(directory, groups.tp, device=device, dtype=dtype, vocab_size=vocab_size, options=options,
                         max_prefill_tokens=max_prefill_tokens, ready=ready, **limits)  # fmt: skip


def load_engine(name: str, directory: str | Path, groups: ModelGroups, *, device: torch.device, dtype: torch.dtype,
                max_sequences: int, max_sequence_length: int, **options: Any) -> GenerationEngine:  # fmt: skip
    """An engine with the weights of a Hugging Face directory. Collective over the tensor-parallel ranks of ``groups``.

    Args:
        name: ``"megatron"``, the built-in generator, ``"hf"``, ``model.generate()`` of transformers on one rank, or
            ``"vllm"``.
        options: of the built-in generator (:class:`rl3d.generation.MegatronGenerator`), or of ``vllm.LLM``.

    Raises:
        ValueError: another name, or ``hf`` on several ranks.
        CheckpointError: the weights do not match the configuration.
    """
    if (problem := engine_problem(name, groups.tp_size)) is not None:
        raise ValueError(problem)
    if name == "hf":
        from transformers import AutoModelForCausalLM

        from rl3d.generation.hf import HFGenerator

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return HFGenerator(model.to(device).eval(), max_sequences=max_sequences, max_sequence_length=max_sequence_length)
    if name == "vllm":
        from rl3d.generation.vllm import VLLMGenerator
        from rl3d.models import Architecture

        vocab_size = Architecture.from_hf(directory).vocab_size
        return VLLMGenerator(directory, groups.tp, device=device, dtype=dtype, max_sequences=max_sequences, weights=True,
                             max_sequence_length=max_sequence_length, vocab_size=vocab_size, options=options)  # fmt: skip
    from rl3d.generation.attention import CachedSelfAttention
    from rl3d.generation.megatron import MegatronGenerator
    from rl3d.io import import_hf
    from rl3d.models import Architecture
    from rl3d.models.build import build_model, canonical_parameters

    arch = Architecture.from_hf(directory)
    padded = arch.padded_vocab(groups.tp_size)
    model = build_model(
        arch, groups, padded_vocab=padded, dtype=dtype, device=device, mode="generate", self_attention=CachedSelfAttention
    )
    parameters = {n: p.data for n, p in canonical_parameters(model, arch, groups).items()}
    import_hf(directory, arch, padded, parameters, groups.tp_size, groups.tp_rank)
    generator = MegatronGenerator(
        model, groups.tp, arch.vocab_size, max_sequences=max_sequences, max_sequence_length=max_sequence_length,
        device=device, dtype=dtype, **options,
    )  # fmt: skip
    generator.weights_version = 0
    return generator
