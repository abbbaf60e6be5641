"""What a Hugging Face configuration says about a decoder, read strictly.

A field that changes the computation and that nothing here understands is an error: a model that is almost right trains
silently to something wrong.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl3d.models.errors import UnsupportedModelError
from rl3d.models.rope_settings import rope_settings


@dataclass(frozen=True)
class _Family:
    """What the configurations of one model_type say and leave unsaid.

    Attributes:
        fixed: fields with the only value that the computation here covers.
        defaults: what transformers' configuration class takes for a field that the file leaves out.
        ignored: fields that change nothing in the models covered.
        qkv_bias, qk_norm, post_norm: as in :class:`Architecture`; no field of the configuration says so.
        window: a ``sliding_window`` counts whatever ``use_sliding_window`` says.
    """

    fixed: dict[str, Any]
    defaults: dict[str, Any]
    ignored: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    window: bool = False


# Any other field of a configuration is either read below or describes no computation (token ids, dtype, bookkeeping).
_FAMILIES: dict[str, _Family] = {
    "llama": _Family({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}, {}),
    "mistral": _Family(
        {"hidden_act": "silu"},
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window=True,
    ),
    "qwen2": _Family(
        {"hidden_act": "silu", "use_sliding_window": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        qkv_bias=True,
    ),
    "qwen3": _Family(
        {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        qk_norm="head",
    ),
    "phi3": _Family(
        {"hidden_act": "silu", "attention_bias": False, "partial_rotary_factor": 1.0},
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ignored=("original_max_position_embeddings",),  # read by longrope only
        window=True,
    ),
    "olmo2": _Family(
        {"hidden_act": "silu", "attention_bias": False}, {"rms_norm_eps": 1e-5}, qk_norm="projection", post_norm=True
    ),
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_READ = {
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "sliding_window", "layer_types", "max_window_layers",
}  # fmt: skip
_NO_COMPUTATION = {
    "architectures", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "use_cache", "attention_dropout", "_name_or_path", "auto_map", "is_llama_config",
    "rope_interleaved", "transformers.js_config", "_attn_implementation", "pretraining_tp", "quantization_config",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "is_encoder_decoder", "torchscript", "_model_name_or_path",
}  # fmt: skip


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

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV projection: (query heads + 2 x KV heads) x head_dim."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        bias = self.qkv_rows if self.qkv_bias else 0
        heads = {"none": 0, "head": 2, "projection": self.num_heads + self.num_kv_heads}[self.qk_norm]
        norms = 2 * self.hidden_size + heads * self.head_dim
        layer = attention + bias + 3 * self.hidden_size * self.ffn_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        if self.value_head:
            embeddings = (self.vocab_size + 1) * self.hidden_size + self.value_bias
        return self.num_layers * layer + embeddings + self.hidden_size

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
    def from_hf(cls, source: "str | Path | Mapping[str, Any] | Any") -> "Architecture":
        """Read a directory with ``config.json``, a mapping, or a ``transformers`` configuration object.

        Raises:
            FileNotFoundError: the directory has no ``config.json``.
            UnsupportedModelError: the model type, or a field that changes the computation, is not covered.
        """
        config = _as_dict(source)
        name = config.get("model_type")
        if name not in _FAMILIES:
            raise UnsupportedModelError(f"model_type {name!r} is not supported; expected one of {sorted(_FAMILIES)}")
        family = _FAMILIES[name]
        config = {**family.defaults, **config}
        if missing := [key for key in _REQUIRED if not isinstance(config.get(key), int)]:
            raise UnsupportedModelError(f"{name}: the configuration does not say {', '.join(missing)}")
        _refuse_unknown(config, name)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        longest = config.get("max_position_embeddings", 2048)
        theta, scaling = rope_settings(config, name, longest)
        return cls(
            family=name,
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rms_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=_longest_full_attention(config, name),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            post_norm=family.post_norm,
            rope_scaling=scaling,
        )


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


def _refuse_unknown(config: Mapping[str, Any], family: str) -> None:
    fixed, known = _FAMILIES[family].fixed, _READ | _NO_COMPUTATION | set(_FAMILIES[family].ignored)
    for key, value in config.items():
        if key in fixed:
            if value not in (fixed[key], None):
                raise UnsupportedModelError(f"{family}: {key} = {value!r} is not supported; expected {fixed[key]!r}")
        elif key == "quantization_config" and value:
            raise UnsupportedModelError(f"{family}: quantised weights ({key}) cannot be trained; dequantise them first")
        elif key == "pretraining_tp" and value not in (None, 1):
            raise UnsupportedModelError(f"{family}: pretraining_tp = {value} splits the projections; set it to 1")
        elif key not in known and value not in (None, False, 0, 0.0, "", [], {}):
            raise UnsupportedModelError(
                f"{family}: configuration field {key} = {value!r} is not understood; remove it if it does not change "
                f"the computation"
            )


def _longest_full_attention(config: Mapping[str, Any], family: str) -> int:
    """A window that no sequence outgrows is full attention; a longer sequence is refused where its length is known."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 2048)
    if kinds and not (kinds == {"sliding_attention"} and window is not None):
        raise UnsupportedModelError(f"{family}: layer_types {sorted(kinds)} are not supported; expected full_attention")
    slides = kinds or _FAMILIES[family].window
    return min(window, longest) if slides and window is not None else longest
