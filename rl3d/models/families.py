"""Families as data: how Megatron parameters and Hugging Face tensors correspond. The only mapping; everything uses it."""

from dataclasses import replace
from functools import partial

from rl3d.models.architecture import Architecture
from rl3d.models.parts import Experts, Latent
from rl3d.models.rules import Rows, Rule, Segment, gate_up, grouped_qkv, packed_qkv, whole

_LAYER = "decoder.layers.{i}."
_ATTENTION, _MLP = _LAYER + "self_attention.", _LAYER + "mlp."
_EXPERT = _MLP + "experts.local_experts.{e}."


def _experts(a: Architecture) -> Experts:
    assert a.experts is not None, a.family
    return a.experts


def _latent(a: Architecture) -> Latent:
    assert a.latent is not None, a.family
    return a.latent


def _norm(name: str, hf_name: str, size: Rows = lambda a: a.hidden_size) -> Rule:
    return Rule(_LAYER + name, lambda a: (size(a),), whole(hf_name, size))


def _gated(head: str, hf_head: str, size: Rows, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
           mlp: str = "", expert: str = "") -> tuple[Rule, Rule]:  # fmt: skip
    """The two projections of a gated MLP; ``names`` are Hugging Face's for gate, up and down."""
    gate, up, down = (f"{hf_head}{name}.weight" for name in names)
    fc1 = Rule(head + "linear_fc1.weight", lambda a: (2 * size(a), a.hidden_size), gate_up(gate, up, size), dim=0,
               blocks=lambda a: (size(a), size(a)), mlp=mlp, expert=expert)  # fmt: skip
    fc2 = Rule(head + "linear_fc2.weight", lambda a: (a.hidden_size, size(a)), whole(down, lambda a: a.hidden_size), dim=1,
               mlp=mlp, expert=expert)  # fmt: skip
    return fc1, fc2


_EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    lambda a: (a.vocab_size, a.hidden_size),
    whole("model.embed_tokens.weight", lambda a: a.vocab_size),
    dim=0,
    place="pre",
    vocabulary=True,
)
_QKV = Rule(_ATTENTION + "linear_qkv.weight", lambda a: (a.qkv_rows, a.hidden_size), grouped_qkv, dim=0)
_QKV_BIAS = Rule(_ATTENTION + "linear_qkv.bias", lambda a: (a.qkv_rows,), partial(grouped_qkv, kind="bias"), dim=0)
_PROJ = Rule(
    _ATTENTION + "linear_proj.weight",
    lambda a: (a.hidden_size, a.num_heads * a.head_dim),
    whole("self_attn.o_proj.weight", lambda a: a.hidden_size),
    dim=1,
)
_MLPS = _FC1, _FC2 = _gated(_MLP, "mlp.", lambda a: a.ffn_size)
_FINAL = Rule(
    "decoder.final_layernorm.weight",
    lambda a: (a.hidden_size,),
    whole("model.norm.weight", lambda a: a.hidden_size),
    place="post",
)
_HEAD = Rule(
    "output_layer.weight",
    lambda a: (a.vocab_size, a.hidden_size),
    whole("lm_head.weight", lambda a: a.vocab_size),
    dim=0,
    place="post",
    vocabulary=True,
    condition=lambda a: not a.tied,
)
_NORMS_BEFORE = (
    _norm("input_layernorm.weight", "input_layernorm.weight"),
    _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_NORMS_AFTER = (
    _norm("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
    _norm("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)
# gemma 2 and 3 have four; their values are offsets from one on both sides (layernorm_zero_centered_gamma)
_NORMS_AROUND = (
    _norm("input_layernorm.weight", "input_layernorm.weight"),
    _norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
    *_NORMS_AFTER,
)
# one weight of head_dim for every head, or one for every row of the projection
_HEAD_NORMS = tuple(
    _norm(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", lambda a: a.head_dim) for x in "qk"
)
_PROJECTION_NORMS = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", lambda a: a.num_heads * a.head_dim),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", lambda a: a.num_kv_heads * a.head_dim),
)

# Latent attention. megatron-core keeps the small projections whole on every rank with Transformer Engine; its local
# modules cut their rows and gather afterwards. On disk both are the same.
_QUERY_LATENT, _QUERY_WHOLE = (lambda a: _latent(a).q_rank is not None), (lambda a: _latent(a).q_rank is None)


def _query_rows(a: Architecture) -> int:
    return a.num_heads * (_latent(a).nope_dim + _latent(a).rope_dim)


def _q_rank(a: Architecture) -> int:
    return _latent(a).q_rank or 0


def _kv_down_rows(a: Architecture) -> int:
    return _latent(a).kv_rank + _latent(a).rope_dim


def _kv_up_rows(a: Architecture) -> int:
    return a.num_heads * (_latent(a).nope_dim + _latent(a).value_dim)


_LATENT_ATTENTION = (
    Rule(_ATTENTION + "linear_q_proj.weight", lambda a: (_query_rows(a), a.hidden_size),
         whole("self_attn.q_proj.weight", _query_rows), dim=0, condition=_QUERY_WHOLE),
    Rule(_ATTENTION + "linear_q_down_proj.weight", lambda a: (_q_rank(a), a.hidden_size),
         whole("self_attn.q_a_proj.weight", _q_rank), condition=_QUERY_LATENT),
    replace(_norm("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", _q_rank),
            condition=_QUERY_LATENT),
    Rule(_ATTENTION + "linear_q_up_proj.weight", lambda a: (_query_rows(a), _q_rank(a)),
         whole("self_attn.q_b_proj.weight", _query_rows), dim=0, condition=_QUERY_LATENT),
    Rule(_ATTENTION + "linear_kv_down_proj.weight", lambda a: (_kv_down_rows(a), a.hidden_size),
         whole("self_attn.kv_a_proj_with_mqa.weight", _kv_down_rows)),
    _norm("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", lambda a: _latent(a).kv_rank),
    Rule(_ATTENTION + "linear_kv_up_proj.weight", lambda a: (_kv_up_rows(a), _latent(a).kv_rank),
         whole("self_attn.kv_b_proj.weight", _kv_up_rows), dim=0),
    Rule(_ATTENTION + "linear_proj.weight", lambda a: (a.hidden_size, a.num_heads * _latent(a).value_dim),
         whole("self_attn.o_proj.weight", lambda a: a.hidden_size), dim=1),
)  # fmt: skip


# Mixtures of experts: a router that every rank holds, experts that expert parallelism places, one shared expert.
def _router(hf_name: str, keeps_dtype: bool = False) -> Rule:
    return Rule(
        _MLP + "router.weight",
        lambda a: (_experts(a).count, a.hidden_size),
        whole(hf_name, lambda a: _experts(a).count),
        mlp="sparse",
        keeps_dtype=keeps_dtype,
    )


def _expert_ffn(a: Architecture) -> int:
    return _experts(a).ffn_size


def _shared_ffn(a: Architecture) -> int:
    return _experts(a).shared_ffn


_DENSE = tuple(replace(rule, mlp="dense") for rule in _MLPS)
_MIXTRAL_EXPERTS = _gated(_EXPERT, "", _expert_ffn, ("w1", "w3", "w2"), "sparse", "block_sparse_moe.experts.{e}.")
_QWEN_EXPERTS = _gated(_EXPERT, "", _expert_ffn, mlp="sparse", expert="mlp.experts.{e}.")
_SHARED_GATE = Rule(
    _MLP + "shared_experts.gate_weight", lambda a: (1, a.hidden_size), whole("mlp.shared_expert_gate.weight", lambda a: 1),
    mlp="sparse",
)  # fmt: skip
# added to scores between 0 and 1 when experts are chosen: rounded to bf16 it would choose others (fp32 in both)
_CORRECTION = Rule(
    _MLP + "router.expert_bias", lambda a: (_experts(a).count,),
    whole("mlp.gate.e_score_correction_bias", lambda a: _experts(a).count), mlp="sparse", keeps_dtype=True,
)  # fmt: skip


def _family(*layer: Rule) -> tuple[Rule, ...]:
    return (_EMBEDDING, *layer, _FINAL, _HEAD)


_LLAMA = _family(*_NORMS_BEFORE, _QKV, _PROJ, *_MLPS)
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _family(*_NORMS_BEFORE, _QKV, _QKV_BIAS, _PROJ, *_MLPS),
    "qwen3": _family(*_NORMS_BEFORE, _QKV, *_HEAD_NORMS, _PROJ, *_MLPS),
    "phi3": _family(
        *_NORMS_BEFORE,
        replace(_QKV, segments=packed_qkv),
        _PROJ,
        replace(_FC1, segments=whole("mlp.gate_up_proj.weight", lambda a: 2 * a.ffn_size)),
        _FC2,
    ),
    "olmo2": _family(_QKV, *_PROJECTION_NORMS, _PROJ, *_MLPS, *_NORMS_AFTER),
    "mixtral": _family(*_NORMS_BEFORE, _QKV, _PROJ, _router("block_sparse_moe.gate.weight"), *_MIXTRAL_EXPERTS),
    "qwen2_moe": _family(
        *_NORMS_BEFORE, _QKV, _QKV_BIAS, _PROJ, *_DENSE, _router("mlp.gate.weight"), *_QWEN_EXPERTS, _SHARED_GATE,
        *_gated(_MLP + "shared_experts.", "mlp.shared_expert.", _shared_ffn, mlp="sparse"),
    ),
    "qwen3_moe": _family(
        *_NORMS_BEFORE, _QKV, *_HEAD_NORMS, _PROJ, *_DENSE, _router("mlp.gate.weight"), *_QWEN_EXPERTS
    ),
    "gemma": _LLAMA,
    "gemma2": _family(*_NORMS_AROUND, _QKV, _PROJ, *_MLPS),
    "gemma3_text": _family(*_NORMS_AROUND, _QKV, *_HEAD_NORMS, _PROJ, *_MLPS),
    "deepseek_v3": _family(
        *_NORMS_BEFORE, *_LATENT_ATTENTION, *_DENSE,
        _router("mlp.gate.weight", keeps_dtype=True),  # transformers keeps it in fp32, the hub in bf16
        _CORRECTION, *_QWEN_EXPERTS, *_gated(_MLP + "shared_experts.", "mlp.shared_experts.", _shared_ffn, mlp="sparse"),
    ),
}  # fmt: skip

# one number for each token, in transformers' ...ForSequenceClassification and ...ForTokenClassification (with a bias);
# small and replicated over tensor parallelism, whatever the family
VALUE_HEAD = (
    Rule("value_head.weight", lambda a: (1, a.hidden_size), lambda a, _: [Segment("score.weight", 0, 0, 1)], place="post"),
    Rule("value_head.bias", lambda a: (1,), lambda a, _: [Segment("score.bias", 0, 0, 1)], place="post",
         condition=lambda a: a.value_bias),
)  # fmt: skip
