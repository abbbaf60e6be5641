"""Tiny Hugging Face llamas with random weights, and the engine over them on the ranks of a test."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl3d.generation.engine import Request, SamplingParams

VOCAB = 253  # odd on purpose: with TP = 4 the embedding has three rows of padding
MAX_LENGTH = 96


def save_llama(directory: Path, *, tied: bool, heads: int = 8, kv_heads: int = 4, seed: int = 0) -> Path:
    """A 3-layer llama whose next-token distributions are peaked enough to have clear decisions, flat enough to vary."""
    return save_model(directory, "llama", tied=tied, heads=heads, kv_heads=kv_heads, seed=seed)


def save_model(
    directory: Path, family: str, *, tied: bool = False, heads: int = 8, kv_heads: int = 4, head_dim: int = 8,
    seed: int = 0,
) -> Path:  # fmt: skip
    """As :func:`save_llama`, of another family; biases and norms are not left at their trivial initial values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, hidden_size=64, num_hidden_layers=3, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=128, vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=tied,
        rms_norm_eps=1e-6, initializer_range=0.12, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, sliding_window=None, use_sliding_window=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if family != "llama" and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


@dataclass
class Job:
    """One call of the engine: which model at which TP, how the engine is set up, what is asked.

    With ``split`` the replicas share the requests, otherwise every replica gets all of them.
    """

    model: str
    tp: int
    requests: list[Request]
    engine: dict[str, Any] = field(default_factory=dict)
    split: bool = False

    def to_json(self) -> dict[str, Any]:
        requests = [{"prompt_ids": r.prompt_ids, "key": r.key, "params": vars(r.params)} for r in self.requests]
        return {"model": self.model, "tp": self.tp, "engine": self.engine, "split": self.split, "requests": requests}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Job":
        requests = []
        for r in data["requests"]:
            params = {**r["params"], **{name: tuple(r["params"][name]) for name in ("stop_token_ids", "stop")}}
            requests.append(Request(r["prompt_ids"], SamplingParams(**params), tuple(r["key"])))
        return cls(data["model"], data["tp"], requests, data["engine"], data["split"])


def build_engine(directory: str, groups: Any, **engine: Any) -> Any:
    """The built-in generator on the weights in ``directory``, fp32 on the CPU."""
    from rl3d.generation.attention import CachedSelfAttention
    from rl3d.generation.megatron import MegatronGenerator
    from rl3d.io.import_hf import import_hf
    from rl3d.models import Architecture
    from rl3d.models.build import build_model, canonical_parameters

    arch = Architecture.from_hf(directory)
    padded = arch.padded_vocab(1, 2, 4)
    device = torch.device("cpu")
    model = build_model(
        arch, groups, padded_vocab=padded, dtype=torch.float32, device=device, mode="generate",
        self_attention=CachedSelfAttention,
    )  # fmt: skip
    import_hf(directory, arch, padded, canonical_parameters(model, arch, groups), groups.tp_size, groups.tp_rank)
    if padded > arch.vocab_size:
        _spoil_padding(model, arch.vocab_size, padded, groups)
    settings = {"max_sequences": 4, "max_sequence_length": MAX_LENGTH, **engine}
    generator = MegatronGenerator(model, groups.tp, arch.vocab_size, device=device, dtype=torch.float32, **settings)
    generator.weights_version = 0
    return generator


@torch.no_grad()
def _spoil_padding(model: torch.nn.Module, vocab_size: int, padded: int, groups: Any) -> None:
    """Fill the rows that pad the vocabulary with copies of large values: they must never be drawn or counted."""
    rows = padded // groups.tp_size
    first_bad = max(0, vocab_size - rows * groups.tp_rank)
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight") and first_bad < rows:
            parameter[first_bad:] = 50.0
