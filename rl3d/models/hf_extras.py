"""What the configurations of converted-only families say beyond sizes: experts, latent attention, Gemma's variations.

Each function gives fields of :class:`~rl3d.models.Architecture` from a configuration whose defaults are filled in.
"""

import math
from collections.abc import Mapping
from typing import Any

from rl3d.models.errors import UnsupportedModelError
from rl3d.models.parts import Experts, Latent
from rl3d.models.rope_settings import rope_settings

Config = Mapping[str, Any]


def mixtral(config: Config) -> dict[str, Any]:
    count = config.get("num_experts") or config["num_local_experts"]
    sparse = (True,) * config["num_hidden_layers"]
    return {"experts": Experts(count, config["num_experts_per_tok"], config["intermediate_size"], sparse)}


def qwen_moe(config: Config) -> dict[str, Any]:
    step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    count = config.get("num_local_experts") or config["num_experts"]
    shared = config["shared_expert_intermediate_size"] if config["model_type"] == "qwen2_moe" else 0
    experts = Experts(
        count, config["num_experts_per_tok"], config["moe_intermediate_size"],
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])),
        shared_ffn=shared, shared_gate=shared > 0, normalised=bool(config.get("norm_topk_prob", False)),
    )  # fmt: skip
    return {"experts": experts}


def deepseek(config: Config) -> dict[str, Any]:
    if config.get("num_key_value_heads") not in (None, config["num_attention_heads"]):
        raise UnsupportedModelError(
            f"deepseek_v3: num_key_value_heads = {config['num_key_value_heads']} is not supported; expected "
            f"num_attention_heads, {config['num_attention_heads']}: latent attention has no groups of heads"
        )
    first = config["first_k_dense_replace"]
    experts = Experts(
        config.get("num_local_experts") or config["n_routed_experts"],
        config["num_experts_per_tok"], config["moe_intermediate_size"],
        sparse=tuple(i >= first for i in range(config["num_hidden_layers"])),
        shared_ffn=config["n_shared_experts"] * config["moe_intermediate_size"], score="sigmoid",
        normalised=bool(config["norm_topk_prob"]), groups=config["n_group"], active_groups=config["topk_group"],
        scaling=float(config["routed_scaling_factor"]), bias=True,
    )  # fmt: skip
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    latent = Latent(config["q_lora_rank"], config["kv_lora_rank"], nope, rope, config["v_head_dim"])
    return {"experts": experts, "latent": latent, "head_dim": nope + rope, "num_kv_heads": config["num_attention_heads"]}


def gemma(config: Config) -> dict[str, Any]:
    return {
        "zero_centred_norms": True, "activation": "gelu_tanh", "embedding_scale": math.sqrt(config["hidden_size"]),
    }  # fmt: skip


def gemma2(config: Config) -> dict[str, Any]:
    return gemma(config) | {
        "sandwich_norms": True,
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
        "windows": _windows(config, 2),
    }


def gemma3(config: Config) -> dict[str, Any]:
    windows = _windows(config, config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    rope = config.get("rope_parameters") or {}
    longest = config["max_position_embeddings"]
    given = {kind: dict(rope.get(kind) or {}) for kind in ("full_attention", "sliding_attention")}
    if rope and not any(given.values()):
        raise UnsupportedModelError(
            f"gemma3_text: rope_parameters = {dict(rope)} do not say whose they are; expected full_attention and "
            f"sliding_attention in them (transformers would read neither)"
        )
    given["full_attention"].update(config.get("rope_scaling") or {})
    defaults = {"full_attention": config.get("rope_theta") or 1e6,
                "sliding_attention": config.get("rope_local_base_freq") or 1e4}  # fmt: skip
    kinds = {}
    for kind, theta in defaults.items():  # transformers' own defaults, 1e6 and 1e4
        kinds[kind] = rope_settings({"rope_parameters": {"rope_theta": theta, **given[kind]}}, "gemma3_text", longest)
    theta, scaling = kinds["full_attention"]
    return gemma2(config) | {
        "windows": windows, "rope_theta": theta, "rope_scaling": scaling, "local_rope": kinds["sliding_attention"],
    }  # fmt: skip


def _windows(config: Config, pattern: int) -> tuple[int, ...]:
    """Each layer's window; every ``pattern``-th layer is full where ``layer_types`` does not say."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    kinds = config.get("layer_types") or ["full_attention" if (i + 1) % pattern == 0 else "" for i in range(layers)]
    if len(kinds) != layers:
        raise UnsupportedModelError(f"layer_types names {len(kinds)} layers; expected num_hidden_layers, {layers}")
    return tuple(0 if kind == "full_attention" else window for kind in kinds)
