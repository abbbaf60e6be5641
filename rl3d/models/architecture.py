"""A decoder in numbers: what a Hugging Face configuration says about it (:mod:`rl3d.models.hf_config` reads it)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl3d.models.errors import UnsupportedModelError
from rl3d.models.hf_config import read_fields
from rl3d.models.parts import Experts, Latent

__all__ = ["Architecture", "Experts", "Latent", "UnsupportedModelError"]


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer in numbers. Sizes are global (TP = 1); ``vocab_size`` is the real one, unpadded.

    Attributes:
        qk_norm: RMS norm of queries and keys before the rotation: ``"none"``, ``"head"`` (each head by itself, one
            weight of head_dim for all of them; qwen3) or ``"projection"`` (over all heads together, one weight for
            each row of the projection; olmo2).
        post_norm: the norms of a layer follow attention and MLP, before the residual is added (olmo2), instead of
            coming before them.
        max_positions: longest sequence that is computed as the model would: its ``max_position_embeddings``, or its
            sliding window where that is shorter, within which attention is full.
        rope_scaling: fields of transformers' ``rope_parameters`` except theta, sorted; empty for plain RoPE.
        value_head: one number for each token, [1, hidden] (with ``value_bias`` a bias), in place of the vocabulary.
        not_trained: why rl3d's engines do not compute the model, which can then only be converted and planned; empty
            for all that :meth:`from_hf` gives by default. What follows is read for such models only.
        experts, latent: mixture of experts, latent attention; ``None`` for the usual ones. ``ffn_size`` is that of dense
            layers.
        sandwich_norms: norms both before and after attention and MLP (gemma 2 and 3).
        zero_centred_norms: a norm multiplies by 1 + weight (gemma). megatron-core's ``layernorm_zero_centered_gamma``
            means the same, so the values are carried unchanged.
        activation: of the gate: ``"silu"``, or ``"gelu_tanh"`` (gemma).
        embedding_scale: factor of the embeddings (gemma: the square root of the hidden size).
        attention_scale: factor of the attention scores where it is not head_dim ** -0.5.
        attention_softcap, logit_softcap: c in c * tanh(x / c) over attention scores and logits (gemma 2).
        windows: for each layer the length of its sliding window, 0 for full attention; empty where all are full.
        local_rope: theta and scaling of the layers with a window, where those differ (gemma 3).
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    rope_theta: float
    rms_eps: float
    max_positions: int
    qkv_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    value_head: bool = False
    value_bias: bool = False
    not_trained: tuple[str, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    sandwich_norms: bool = False
    zero_centred_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int, ...] = ()
    local_rope: tuple[float, tuple[tuple[str, Any], ...]] | None = None

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV projection: (query heads + 2 x KV heads) x head_dim."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_experts(self) -> int:
        """Experts of a sparse layer; 0 for a dense model."""
        return self.experts.count if self.experts else 0

    def sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.sparse[layer]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, all experts counted, a tied embedding once."""
        hidden = self.hidden_size
        if self.latent is not None:
            attention = self.latent.parameters(hidden, self.num_heads)
        else:
            attention = hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
            attention += self.qkv_rows if self.qkv_bias else 0
        heads = {"none": 0, "head": 2, "projection": self.num_heads + self.num_kv_heads}[self.qk_norm]
        norms = (4 if self.sandwich_norms else 2) * hidden + heads * self.head_dim
        sparse = sum(self.experts.sparse) if self.experts else 0
        mlps = (self.num_layers - sparse) * 3 * hidden * self.ffn_size
        mlps += sparse * self.experts.parameters(hidden) if self.experts else 0
        embeddings = self.vocab_size * hidden * (1 if self.tied else 2)
        if self.value_head:
            embeddings = (self.vocab_size + 1) * hidden + self.value_bias
        return self.num_layers * (attention + norms) + mlps + embeddings + hidden

    def as_value_model(self, bias: bool = False) -> "Architecture":
        """The same backbone under a value head. Never tied: the last stage then holds no copy of the embedding."""
        return replace(self, tied=False, value_head=True, value_bias=bias)

    def padded_vocab(self, *tp_sizes: int, multiple: int = 1) -> int:
        """Rows of the embedding, rounded up so that every tensor-parallel size given divides them.

        One padded size serves all layouts of a run, so that pad rows never have to move.
        """
        unit = math.lcm(multiple, *tp_sizes)
        return -(-self.vocab_size // unit) * unit

    @classmethod
    def from_hf(cls, source: "str | Path | Mapping[str, Any] | Any", *, convert_only: bool = False) -> "Architecture":
        """Read a directory with ``config.json``, a mapping, or a ``transformers`` configuration object.

        Args:
            convert_only: also accept what can be converted and planned but not trained (``not_trained`` then says why).

        Raises:
            FileNotFoundError: the directory has no ``config.json``.
            NotTrainedError: the model, or a setting of it, is not computed here.
            UnsupportedModelError: the model type, or a field that changes the computation, is unknown.
        """
        return cls(**read_fields(_as_dict(source), convert_only))


def _as_dict(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return source.to_dict()
    path = Path(source)
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; expected a Hugging Face model directory with a config.json")
    return json.loads(file.read_text())
