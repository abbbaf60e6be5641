"""Families as data: how Megatron parameters and Hugging Face tensors correspond, row by row.

A rule says which Hugging Face tensors make up one Megatron (canonical) parameter, in which order of rows, and how tensor
parallelism cuts it. Every correspondence here is a list of row segments, so that any rank can read exactly the slice
it needs, and the export is the same list read backwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from rl3d.layout.spec import ParamSpec
from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError


class Segment(NamedTuple):
    """``length`` rows of ``hf_name`` from ``hf_start`` are rows ``start ...`` of the canonical parameter."""

    hf_name: str
    hf_start: int
    start: int
    length: int


@dataclass(frozen=True)
class Rule:
    """One canonical parameter (``{i}`` = global layer) and where its rows are in the Hugging Face checkpoint.

    ``dim``/``blocks`` are :class:`ParamSpec`'s; ``segments`` gets the architecture and the layer's HF prefix; the rule
    exists for architectures that satisfy ``condition``.
    """

    name: str
    shape: Callable[[Architecture], tuple[int, ...]]
    segments: Callable[[Architecture, str], list[Segment]]
    dim: int | None = None
    blocks: Callable[[Architecture], tuple[int, ...]] | None = None
    place: str = "layer"
    vocabulary: bool = False
    condition: Callable[[Architecture], bool] = lambda a: True


def _whole(hf_name: str, rows: Callable[[Architecture], int]) -> Callable[[Architecture, str], list[Segment]]:
    return lambda a, prefix: [Segment(prefix + hf_name, 0, 0, rows(a))]


def _qkv_rows(a: Architecture) -> Iterator[tuple[str, int, int, int]]:
    """(projection, row of it, row of the fused parameter, rows) of every run.

    Megatron interleaves by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...].
    """
    d, per_group = a.head_dim, a.num_heads // a.num_kv_heads
    row = 0
    for g in range(a.num_kv_heads):
        for proj, start, rows in (("q", g * per_group * d, per_group * d), ("k", g * d, d), ("v", g * d, d)):
            yield proj, start, row, rows
            row += rows


def _grouped_qkv(a: Architecture, prefix: str, kind: str = "weight") -> list[Segment]:
    return [Segment(f"{prefix}self_attn.{proj}_proj.{kind}", *rows) for proj, *rows in _qkv_rows(a)]


def _packed_qkv(a: Architecture, prefix: str) -> list[Segment]:
    """phi-3 keeps one tensor of rows [all q; all k; all v]."""
    name = f"{prefix}self_attn.qkv_proj.weight"
    first = {"q": 0, "k": a.num_heads * a.head_dim, "v": (a.num_heads + a.num_kv_heads) * a.head_dim}
    return [Segment(name, first[proj] + start, row, rows) for proj, start, row, rows in _qkv_rows(a)]


def _gate_up(a: Architecture, prefix: str) -> list[Segment]:
    return [
        Segment(prefix + "mlp.gate_proj.weight", 0, 0, a.ffn_size),
        Segment(prefix + "mlp.up_proj.weight", 0, a.ffn_size, a.ffn_size),
    ]


def _packed_gate_up(a: Architecture, prefix: str) -> list[Segment]:
    return [Segment(prefix + "mlp.gate_up_proj.weight", 0, 0, 2 * a.ffn_size)]


_LAYER = "decoder.layers.{i}."
_ATTENTION, _MLP = _LAYER + "self_attention.", _LAYER + "mlp."


def _norm(name: str, hf_name: str, size: Callable[[Architecture], int] = lambda a: a.hidden_size) -> Rule:
    return Rule(_LAYER + name, lambda a: (size(a),), _whole(hf_name, size))


_EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    lambda a: (a.vocab_size, a.hidden_size),
    _whole("model.embed_tokens.weight", lambda a: a.vocab_size),
    dim=0,
    place="pre",
    vocabulary=True,
)
_QKV = Rule(_ATTENTION + "linear_qkv.weight", lambda a: (a.qkv_rows, a.hidden_size), _grouped_qkv, dim=0)
_QKV_BIAS = Rule(_ATTENTION + "linear_qkv.bias", lambda a: (a.qkv_rows,), partial(_grouped_qkv, kind="bias"), dim=0)
_PROJ = Rule(
    _ATTENTION + "linear_proj.weight",
    lambda a: (a.hidden_size, a.num_heads * a.head_dim),
    _whole("self_attn.o_proj.weight", lambda a: a.hidden_size),
    dim=1,
)
_FC1 = Rule(
    _MLP + "linear_fc1.weight",
    lambda a: (2 * a.ffn_size, a.hidden_size),
    _gate_up,
    dim=0,
    blocks=lambda a: (a.ffn_size, a.ffn_size),
)
_FC2 = Rule(
    _MLP + "linear_fc2.weight",
    lambda a: (a.hidden_size, a.ffn_size),
    _whole("mlp.down_proj.weight", lambda a: a.hidden_size),
    dim=1,
)
_FINAL = Rule(
    "decoder.final_layernorm.weight",
    lambda a: (a.hidden_size,),
    _whole("model.norm.weight", lambda a: a.hidden_size),
    place="post",
)
_HEAD = Rule(
    "output_layer.weight",
    lambda a: (a.vocab_size, a.hidden_size),
    _whole("lm_head.weight", lambda a: a.vocab_size),
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
# one weight of head_dim for every head, or one for every row of the projection
_HEAD_NORMS = tuple(
    _norm(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", lambda a: a.head_dim) for x in "qk"
)
_PROJECTION_NORMS = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", lambda a: a.num_heads * a.head_dim),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", lambda a: a.num_kv_heads * a.head_dim),
)


def _family(*layer: Rule) -> tuple[Rule, ...]:
    return (_EMBEDDING, *layer, _FINAL, _HEAD)


_LLAMA = _family(*_NORMS_BEFORE, _QKV, _PROJ, _FC1, _FC2)
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _family(*_NORMS_BEFORE, _QKV, _QKV_BIAS, _PROJ, _FC1, _FC2),
    "qwen3": _family(*_NORMS_BEFORE, _QKV, *_HEAD_NORMS, _PROJ, _FC1, _FC2),
    "phi3": _family(
        *_NORMS_BEFORE, replace(_QKV, segments=_packed_qkv), _PROJ, replace(_FC1, segments=_packed_gate_up), _FC2
    ),
    "olmo2": _family(_QKV, *_PROJECTION_NORMS, _PROJ, _FC1, _FC2, *_NORMS_AFTER),
}  # fmt: skip

# one number for each token, in transformers' ...ForSequenceClassification and ...ForTokenClassification (with a bias);
# small and replicated over tensor parallelism, whatever the family
_VALUE_HEAD = (
    Rule("value_head.weight", lambda a: (1, a.hidden_size), lambda a, _: [Segment("score.weight", 0, 0, 1)], place="post"),
    Rule("value_head.bias", lambda a: (1,), lambda a, _: [Segment("score.bias", 0, 0, 1)], place="post",
         condition=lambda a: a.value_bias),
)  # fmt: skip
_LM_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class MappedParameter:
    """A parameter's specification together with the Hugging Face rows it is made of."""

    spec: ParamSpec
    segments: tuple[Segment, ...]


def mapped_parameters(arch: Architecture, padded_vocab: int, dtype: str = "float32") -> list[MappedParameter]:
    """All parameters of a model in layer order, each with its place in the Hugging Face checkpoint.

    Raises:
        UnsupportedModelError: unknown family, or a padded vocabulary smaller than the real one.
    """
    if arch.family not in FAMILIES:
        raise UnsupportedModelError(f"family {arch.family!r} has no rules; expected one of {sorted(FAMILIES)}")
    if padded_vocab < arch.vocab_size:
        raise UnsupportedModelError(f"padded vocabulary {padded_vocab} is smaller than the real one, {arch.vocab_size}")
    rules = list(FAMILIES[arch.family])
    if arch.value_head:
        rules = [r for r in rules if r.name != _LM_HEAD] + list(_VALUE_HEAD)
    rules = [r for r in rules if r.condition(arch)]
    before = [r for r in rules if r.place == "pre"]
    layer = [r for r in rules if r.place == "layer"]
    after = [r for r in rules if r.place == "post"]
    out = [_bind(rule, arch, None, padded_vocab, dtype) for rule in before]
    for i in range(arch.num_layers):
        out += [_bind(rule, arch, i, padded_vocab, dtype) for rule in layer]
    return out + [_bind(rule, arch, None, padded_vocab, dtype) for rule in after]


def parameter_specs(arch: Architecture, padded_vocab: int, dtype: str = "float32") -> list[ParamSpec]:
    """Specifications of all parameters, in layer order."""
    return [m.spec for m in mapped_parameters(arch, padded_vocab, dtype)]


def _bind(rule: Rule, arch: Architecture, layer: int | None, padded_vocab: int, dtype: str) -> MappedParameter:
    shape = rule.shape(arch)
    if rule.vocabulary:
        shape = (padded_vocab, *shape[1:])
    tied_embedding = rule.place == "pre" and rule.vocabulary and arch.tied
    spec = ParamSpec(
        name=rule.name.format(i=layer),
        shape=shape,
        dim=rule.dim,
        blocks=rule.blocks(arch) if rule.blocks else (),
        layer=layer,
        place="pre+post" if tied_embedding else rule.place,
        dtype=dtype,
        valid_rows=arch.vocab_size if rule.vocabulary else None,
    )
    prefix = "" if layer is None else f"model.layers.{layer}."
    return MappedParameter(spec, tuple(rule.segments(arch, prefix)))


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the Hugging Face tensors that the rules produce, each row covered exactly once.

    Raises:
        UnsupportedModelError: the rules leave rows of either side uncovered or cover them twice.
    """
    rows: dict[str, list[tuple[int, int]]] = {}
    trailing: dict[str, tuple[int, ...]] = {}
    for mapped in mapped_parameters(arch, arch.vocab_size):
        _require_cover(mapped.spec.name, [(s.start, s.length) for s in mapped.segments], mapped.spec.shape[0])
        for s in mapped.segments:
            rows.setdefault(s.hf_name, []).append((s.hf_start, s.length))
            trailing[s.hf_name] = mapped.spec.shape[1:]
    out = {}
    for name, runs in rows.items():
        total = sum(length for _, length in runs)
        _require_cover(name, runs, total)
        out[name] = (total, *trailing[name])
    return out


def _require_cover(name: str, runs: list[tuple[int, int]], rows: int) -> None:
    position = 0
    for start, length in sorted(runs):
        if start != position:
            raise UnsupportedModelError(
                f"{name}: rows {position} to {start} are covered {'twice' if start < position else 'by nothing'}"
            )
        position += length
    if position != rows:
        raise UnsupportedModelError(f"{name}: the rules cover {position} of {rows} rows")
