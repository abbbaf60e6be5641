"""A tiny random model of every family and every kind of RoPE, made to show faults.

Odd vocabulary; heads != KV heads; head_dim != hidden / heads where the family lets it; theta that is nobody's default;
original RoPE lengths far below the prompts; biases and norm weights that are neither 0 nor 1; one square MLP.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.reference import TINY

THETA = {"rope_type": "default", "rope_theta": 2e4}
LINEAR = {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0, "original_max_position_embeddings": 32}
LONG = {**TINY, "max_position_embeddings": 2048}
NO_HEAD_DIM = {k: v for k, v in LONG.items() if k != "head_dim"}

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    # one KV head; hidden == MLP size (a transposed square matrix fits everywhere)
    "llama-mqa": (transformers.LlamaConfig, {**LONG, "num_key_value_heads": 1, "intermediate_size": 64}),
    "llama-linear": (transformers.LlamaConfig, {**LONG, "num_key_value_heads": 2, "rope_parameters": LINEAR}),
    "llama3": (transformers.LlamaConfig, {**LONG, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": (transformers.MistralConfig, {**LONG, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, NO_HEAD_DIM),
    "qwen2-tied": (transformers.Qwen2Config, {**NO_HEAD_DIM, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, LONG),
    "qwen3-yarn": (transformers.Qwen3Config,
                   {**LONG, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "phi3": (transformers.Phi3Config, NO_HEAD_DIM),
    "olmo2": (transformers.Olmo2Config, {**NO_HEAD_DIM, "num_key_value_heads": 2}),
}  # fmt: skip


# converted and not trained: layers of both kinds, experts that TP and EP cut, hidden == an expert's size, heads that are not
# hidden / heads wide
_MIXTURE = {**LONG, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
_GEMMA = {**LONG, "num_key_value_heads": 2, "sliding_window": 16}
CONVERTED: dict[str, tuple[type, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, {**LONG, "intermediate_size": 64, "num_local_experts": 4, "sliding_window": None,
                                             "num_experts_per_tok": 2, "rope_parameters": LLAMA3}),
    "qwen2_moe": (transformers.Qwen2MoeConfig,
                  {**{k: v for k, v in _MIXTURE.items() if k != "head_dim"}, "shared_expert_intermediate_size": 48,
                   "mlp_only_layers": [1], "norm_topk_prob": True, "rope_parameters": LINEAR}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**_MIXTURE, "num_key_value_heads": 2, "norm_topk_prob": True,
                                                "tie_word_embeddings": True, "rope_parameters": YARN}),
    "gemma": (transformers.GemmaConfig, _GEMMA),
    "gemma-untied": (transformers.GemmaConfig, {**_GEMMA, "intermediate_size": 64, "tie_word_embeddings": False}),
    "gemma2": (transformers.Gemma2Config, {**_GEMMA, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
                                           "final_logit_softcapping": 8.0}),
    "gemma3_text": (transformers.Gemma3TextConfig,
                    {**_GEMMA, "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "rope_parameters": {"sliding_attention": THETA, "full_attention": LINEAR}}),
    "deepseek_v3": (transformers.DeepseekV3Config,
                    {**NO_HEAD_DIM, "num_key_value_heads": 8, "moe_intermediate_size": 32, "n_routed_experts": 16,
                     "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": 24,
                     "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
                     "rms_norm_eps": 1e-6, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                     "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "deepseek_v3-whole-queries": (transformers.DeepseekV3Config,
                    {**NO_HEAD_DIM, "num_key_value_heads": 8, "moe_intermediate_size": 64, "n_routed_experts": 4,
                     "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 20,
                     "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 2,
                     "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6}),
}  # fmt: skip
EVERY = {**MODELS, **CONVERTED}


def make(name: str, **changes: Any) -> Any:
    """The model, fp32, in evaluation mode; the same weights at every call. ``changes``: of its configuration."""
    kind, settings = EVERY[name]
    torch.manual_seed(1)
    config = kind(**{"rope_parameters": dict(THETA), **settings, **changes}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):  # of the size of the differences between scores
                buffer.normal_(std=0.1)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.2)
            elif "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:  # far from uniform, and attentive to positions
                parameter.mul_(8.0 if "lm_head" in key or "embed" in key else 3.5)
    return model


def save(root: Path, name: str) -> Path:
    """The model as a directory of several safetensors files with an index."""
    make(name).save_pretrained(root / name, max_shard_size="100KB")
    assert (root / name / "model.safetensors.index.json").is_file()
    return root / name
