"""Generation engines by name, from a directory with weights; no training engine around them."""

from pathlib import Path
from typing import Any

import torch

from rl3d.distributed.groups import ModelGroups
from rl3d.generation.engine import GenerationEngine

ENGINES = ("megatron", "hf")


def load_engine(name: str, directory: str | Path, groups: ModelGroups, *, device: torch.device, dtype: torch.dtype,
                max_sequences: int, max_sequence_length: int, **options: Any) -> GenerationEngine:  # fmt: skip
    """An engine with the weights of a Hugging Face directory. Collective over the tensor-parallel ranks of ``groups``.

    Args:
        name: ``"megatron"``, the built-in generator, or ``"hf"``, ``model.generate()`` of transformers on one rank.
        options: of the built-in generator (:class:`rl3d.generation.MegatronGenerator`).

    Raises:
        ValueError: another name, or ``hf`` on several ranks.
        CheckpointError: the weights do not match the configuration.
    """
    if name == "hf":
        if groups.tp_size > 1:
            raise ValueError(f"engine 'hf' runs a whole model on one rank, tp is {groups.tp_size}; use engine 'megatron'")
        from transformers import AutoModelForCausalLM

        from rl3d.generation.hf import HFGenerator

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return HFGenerator(model.to(device).eval(), max_sequences=max_sequences)
    if name != "megatron":
        raise ValueError(f"generation engine {name!r}: expected one of {', '.join(ENGINES)}")
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
