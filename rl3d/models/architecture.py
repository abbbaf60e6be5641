"""What a Hugging Face configuration says about a decoder, read strictly.

A field that changes the computation and that nothing here understands is an error: a model that is almost right trains
silently to something wrong.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModelError(ValueError):
    """A model, or a setting of it, that rl3d cannot compute; the message names the field and its value."""


# model_type -> fields with the only value that the computation here covers. Anything else in the configuration is
# either read below or describes no computation (token ids, dtype, initialisation, bookkeeping).
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
}
_QKV_BIAS = {"qwen2"}  # no field of their configuration says so
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
    """A decoder-only transformer in numbers. Sizes are global (TP = 1); ``vocab_size`` is the real one, unpadded."""

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
    rope_scaling: tuple[tuple[str, Any], ...] = ()

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV projection: (query heads + 2 x KV heads) x head_dim."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        bias = self.qkv_rows if self.qkv_bias else 0
        layer = attention + bias + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

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
        family = config.get("model_type")
        if family not in _FIXED:
            raise UnsupportedModelError(f"model_type {family!r} is not supported; expected one of {sorted(_FIXED)}")
        _refuse_unknown(config, family)
        _refuse_sliding_window(config, family)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=_rope_theta(config),
            rms_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 2048),
            qkv_bias=family in _QKV_BIAS,
            rope_scaling=_rope_scaling(config),
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
    fixed = _FIXED[family]
    for key, value in config.items():
        if key in fixed:
            if value not in (fixed[key], None):
                raise UnsupportedModelError(f"{family}: {key} = {value!r} is not supported; expected {fixed[key]!r}")
        elif key == "quantization_config" and value:
            raise UnsupportedModelError(f"{family}: quantised weights ({key}) cannot be trained; dequantise them first")
        elif key == "pretraining_tp" and value not in (None, 1):
            raise UnsupportedModelError(f"{family}: pretraining_tp = {value} splits the projections; set it to 1")
        elif key not in _READ and key not in _NO_COMPUTATION and value not in (None, False, 0, 0.0, "", [], {}):
            raise UnsupportedModelError(
                f"{family}: configuration field {key} = {value!r} is not understood; remove it if it does not change "
                f"the computation"
            )


def _refuse_sliding_window(config: Mapping[str, Any], family: str) -> None:
    """A window that no sequence outgrows is full attention; any other is not computed here."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 2048)
    if kinds and not (kinds == {"sliding_attention"} and window is not None and window >= longest):
        raise UnsupportedModelError(f"{family}: layer_types {sorted(kinds)} are not supported; expected full_attention")
    if family == "mistral" and window is not None and window < longest:
        raise UnsupportedModelError(
            f"{family}: sliding_window = {window} is not supported; set it to null and max_position_embeddings (now "
            f"{longest}) to at most {window} if your sequences are no longer than that"
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """transformers 5 keeps theta in ``rope_parameters``; older files have it at the top. There is no silent default."""
    parameters = config.get("rope_parameters") or {}
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor = {parameters['partial_rotary_factor']} is not supported")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UnsupportedModelError(
            "the configuration gives no rope_theta (neither in rope_parameters nor at the top); add it: guessing "
            "10000 is wrong for most models"
        )
    return float(theta)


_ROPE_FIELDS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope_scaling(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Scaling of the rotary frequencies as sorted pairs; empty for plain RoPE. Older files call it ``rope_scaling``."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    given = {k: v for k, v in found.items() if k not in ("type", "rope_theta", "partial_rotary_factor") and v is not None}
    if kind == "default":
        return ()
    if kind not in _ROPE_FIELDS:
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; expected default, linear or llama3")
    if set(given) != _ROPE_FIELDS[kind]:
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} has the fields {sorted(given)}; expected {sorted(_ROPE_FIELDS[kind])}"
        )
    return tuple(sorted({"rope_type": kind, **given}.items()))
