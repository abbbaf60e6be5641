"""Reading Hugging Face configurations strictly, family by family.

A field that changes the computation and that nothing here understands is an error: a model that is almost right trains
silently to something wrong.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl3d.models.errors import NotTrainedError, UnsupportedModelError
from rl3d.models.hf_extras import deepseek, gemma, gemma2, gemma3, mixtral, qwen_moe
from rl3d.models.rope_settings import rope_settings


@dataclass(frozen=True)
class _Family:
    """What the configurations of one model_type say and leave unsaid.

    Attributes:
        fixed: fields with the only value (or the tuple of values) that the computation here covers.
        defaults: what transformers' configuration class takes for a field that the file leaves out.
        ignored: fields that change nothing in the models covered.
        qkv_bias, qk_norm, post_norm: as in :class:`~rl3d.models.Architecture`; no field of the configuration says so.
        window: a ``sliding_window`` counts whatever ``use_sliding_window`` says.
        not_trained: what rl3d's engines would have to compute in addition; such a family is converted only.
        extra: gives the fields of :class:`~rl3d.models.Architecture` that only such families have.
        reads: the fields that ``extra`` reads.
    """

    fixed: dict[str, Any]
    defaults: dict[str, Any]
    ignored: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    window: bool = False
    not_trained: str = ""
    extra: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    reads: tuple[str, ...] = ()


_MIXTURE = "a mixture of experts: routing tokens to experts is not computed by rl3d's engines"
_GEMMA_IS = "norms by 1 + weight, GELU-gated MLPs and scaled embeddings"
# weights of the losses and noise that training would add: no part of the computation that is converted
_ROUTER_LOSSES = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA_FIXED = {"attention_bias": False, "use_bidirectional_attention": False, "hidden_activation": "gelu_pytorch_tanh"}

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
    "mixtral": _Family(
        {"hidden_act": "silu"},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        ignored=_ROUTER_LOSSES, window=True, not_trained=_MIXTURE, extra=mixtral,
        reads=("num_local_experts", "num_experts", "num_experts_per_tok"),
    ),
    "qwen2_moe": _Family(
        {"hidden_act": "silu", "use_sliding_window": False, "qkv_bias": True},
        {"num_key_value_heads": 16, "max_position_embeddings": 32768, "decoder_sparse_step": 1, "num_experts": 60,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4},
        ignored=_ROUTER_LOSSES, qkv_bias=True, not_trained=_MIXTURE, extra=qwen_moe,
        reads=("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
               "shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    ),
    "qwen3_moe": _Family(
        {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "decoder_sparse_step": 1, "num_experts": 128,
         "moe_intermediate_size": 768, "num_experts_per_tok": 8},
        ignored=_ROUTER_LOSSES, qk_norm="head", not_trained=_MIXTURE, extra=qwen_moe,
        reads=("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
               "decoder_sparse_step", "mlp_only_layers"),
    ),
    "gemma": _Family(
        {**_GEMMA_FIXED, "hidden_act": ("gelu", "gelu_pytorch_tanh")},  # transformers takes both for the approximation
        {**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        not_trained=f"{_GEMMA_IS} are not computed by rl3d's engines", extra=gemma,
    ),
    "gemma2": _Family(
        {**_GEMMA_FIXED, "hidden_act": "gelu_pytorch_tanh"},
        {**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window": 4096,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ignored=("cache_implementation",), extra=gemma2,
        not_trained=f"soft caps on scores and logits, windows in every other layer, {_GEMMA_IS} are not computed by "
        "rl3d's engines, the caps nor by megatron-core's modules",
        reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": _Family(
        {**_GEMMA_FIXED, "hidden_act": "gelu_pytorch_tanh"},
        {**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096,
         "query_pre_attn_scalar": 256},
        ignored=("cache_implementation",), qk_norm="head", extra=gemma3,
        not_trained=f"a rotary embedding of its own for layers with a window, {_GEMMA_IS} are not computed by rl3d's "
        "engines, the two rotary embeddings nor by megatron-core's modules",
        reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq",
               "sliding_window_pattern", "_sliding_window_pattern"),
    ),
    "deepseek_v3": _Family(
        {"hidden_act": "silu", "attention_bias": False, "rope_interleave": True, "moe_layer_freq": 1,
         "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_routed_experts": 256,
         "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "moe_intermediate_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128},
        # derived sizes; expert parallelism and losses of the run that made it; layers that predict further tokens, whose
        # tensors are refused where they lie in the files
        ignored=(*_ROUTER_LOSSES, "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers",
                 "num_mtp_layers"),
        not_trained=f"latent attention and {_MIXTURE}", extra=deepseek,
        reads=("first_k_dense_replace", "n_shared_experts", "n_routed_experts", "num_local_experts", "n_group",
               "topk_group", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size",
               "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    ),
}  # fmt: skip
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_READ = {
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "sliding_window", "layer_types", "max_window_layers",
}  # fmt: skip
_NO_COMPUTATION = {
    "architectures", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "initializer_range", "use_cache", "attention_dropout", "_name_or_path", "auto_map", "is_llama_config",
    "rope_interleaved", "transformers.js_config", "_attn_implementation", "pretraining_tp", "quantization_config",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "id2label", "label2id",
    "problem_type", "is_encoder_decoder", "torchscript", "_model_name_or_path",
}  # fmt: skip


def trained_families() -> dict[str, str]:
    """Every model_type that is read -> why it is only converted; empty where it is trained."""
    return {name: family.not_trained for name, family in _FAMILIES.items()}


def read_fields(config: Mapping[str, Any], convert_only: bool) -> dict[str, Any]:
    """The fields of :class:`~rl3d.models.Architecture`, whose ``from_hf`` documents arguments and errors."""
    name = config.get("model_type")
    if name not in _FAMILIES:
        raise UnsupportedModelError(f"model_type {name!r} is not supported; expected one of {sorted(_FAMILIES)}")
    family = _FAMILIES[name]
    if family.not_trained and not convert_only:
        raise NotTrainedError(
            f"model_type {name!r} is not supported for training: {family.not_trained}. It can be converted (rl3d convert); "
            f"trained are {', '.join(n for n, f in _FAMILIES.items() if not f.not_trained)}"
        )
    config = {**family.defaults, **config}
    if missing := [key for key in _REQUIRED if not isinstance(config.get(key), int)]:
        raise UnsupportedModelError(f"{name}: the configuration does not say {', '.join(missing)}")
    reasons = [family.not_trained] if family.not_trained else []
    _refuse_unknown(config, name)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    fields = dict(
        family=name,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        max_positions=_longest_full_attention(config, name),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norm=family.post_norm,
    )
    fields |= family.extra(config)
    if "rope_theta" not in fields:
        fields["rope_theta"], fields["rope_scaling"] = _rope(config, name, convert_only, reasons)
    return fields | {"not_trained": tuple(reasons)}


def _rope(config: Mapping[str, Any], name: str, convert_only: bool, reasons: list[str]) -> tuple[float, tuple[Any, ...]]:
    """Theta and scaling; where they are not computed, and need not be, in the words of the configuration."""
    try:
        return rope_settings(config, name, config.get("max_position_embeddings", 2048))
    except NotTrainedError as error:
        if not convert_only:
            raise
        reasons.append(str(error))
        given = {k: config[k] for k in ("rope_parameters", "rope_scaling", "partial_rotary_factor") if config.get(k)}
        theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 0.0
        return float(theta), tuple((k, json.dumps(v, sort_keys=True)) for k, v in sorted(given.items()))


def _refuse_unknown(config: Mapping[str, Any], name: str) -> None:
    family = _FAMILIES[name]
    fixed, known = family.fixed, {*_READ, *_NO_COMPUTATION, *family.ignored, *family.reads}
    for key, value in config.items():
        if key in fixed:
            if key == "partial_rotary_factor":
                continue  # read with the rest of the rotary embedding
            allowed = fixed[key] if isinstance(fixed[key], tuple) else (fixed[key],)
            if value not in (*allowed, None):
                expected = " or ".join(map(repr, allowed))
                raise UnsupportedModelError(f"{name}: {key} = {value!r} is not supported; expected {expected}")
        elif key == "quantization_config" and value:
            raise UnsupportedModelError(f"{name}: quantised weights ({key}) cannot be trained; dequantise them first")
        elif key == "pretraining_tp" and value not in (None, 1):
            raise UnsupportedModelError(f"{name}: pretraining_tp = {value} splits the projections; set it to 1")
        elif key not in known and value not in (None, False, 0, 0.0, "", [], {}):
            raise UnsupportedModelError(
                f"{name}: configuration field {key} = {value!r} is not understood; remove it if it does not change "
                f"the computation"
            )


def _longest_full_attention(config: Mapping[str, Any], name: str) -> int:
    """A window that no sequence outgrows is full attention; a longer sequence is refused where its length is known."""
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 2048)
    if kinds and not (kinds == {"sliding_attention"} and window is not None):
        raise UnsupportedModelError(f"{name}: layer_types {sorted(kinds)} are not supported; expected full_attention")
    slides = kinds or _FAMILIES[name].window
    return min(window, longest) if slides and window is not None else longest
