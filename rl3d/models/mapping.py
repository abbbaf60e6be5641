"""Rules applied to a model: every parameter with its specification and its place in the Hugging Face checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rl3d.layout.spec import ParamSpec
from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError
from rl3d.models.families import FAMILIES, VALUE_HEAD
from rl3d.models.rules import Rule, Segment

_LM_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class MappedParameter:
    """A parameter's specification together with the Hugging Face rows it is made of.

    ``keeps_dtype``: converted weights of another dtype leave this one as it is stored.
    """

    spec: ParamSpec
    segments: tuple[Segment, ...]
    keeps_dtype: bool = False


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
        rules = [r for r in rules if r.name != _LM_HEAD] + list(VALUE_HEAD)
    rules = [r for r in rules if r.condition(arch)]
    before = [r for r in rules if r.place == "pre"]
    layer = [r for r in rules if r.place == "layer"]
    after = [r for r in rules if r.place == "post"]
    out = [_bind(rule, arch, None, padded_vocab, dtype) for rule in before]
    for i in range(arch.num_layers):
        kind = "sparse" if arch.sparse(i) else "dense"
        for rules in _with_experts([r for r in layer if r.mlp in ("", kind)]):
            experts: Iterator[int | None] = iter(range(arch.num_experts)) if rules[0].expert else iter([None])
            out += [_bind(rule, arch, i, padded_vocab, dtype, expert) for expert in experts for rule in rules]
    return out + [_bind(rule, arch, None, padded_vocab, dtype) for rule in after]


def _with_experts(rules: list[Rule]) -> Iterator[list[Rule]]:
    """Runs of rules that are applied together: those of an expert, any other by itself."""
    run: list[Rule] = []
    for rule in rules:
        if run and not (rule.expert and run[0].expert):
            yield run
            run = []
        run.append(rule)
    if run:
        yield run


def parameter_specs(arch: Architecture, padded_vocab: int, dtype: str = "float32") -> list[ParamSpec]:
    """Specifications of all parameters, in layer order; experts under megatron-core's local names."""
    return [m.spec for m in mapped_parameters(arch, padded_vocab, dtype)]


def _bind(rule: Rule, arch: Architecture, layer: int | None, padded_vocab: int, dtype: str,
          expert: int | None = None) -> MappedParameter:  # fmt: skip
    shape = rule.shape(arch)
    if rule.vocabulary:
        shape = (padded_vocab, *shape[1:])
    tied_embedding = rule.place == "pre" and rule.vocabulary and arch.tied
    spec = ParamSpec(
        name=rule.name.format(i=layer, e=expert),
        shape=shape,
        dim=rule.dim,
        blocks=rule.blocks(arch) if rule.blocks else (),
        layer=layer,
        place="pre+post" if tied_embedding else rule.place,
        dtype=dtype,
        valid_rows=arch.vocab_size if rule.vocabulary else None,
        expert=expert,
    )
    prefix = "" if layer is None else f"model.layers.{layer}."
    return MappedParameter(spec, tuple(rule.segments(arch, prefix + rule.expert.format(e=expert))), rule.keeps_dtype)


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


class Fused(NamedTuple):
    """A tensor as transformers holds it in memory: its shape, and (Hugging Face name on disk, expert or ``None``, first
    row) of the tensors that lie in it."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int | None, int], ...]


def fused_tensors(arch: Architecture) -> dict[str, Fused]:
    """Tensors of mixtures under the names and in the shapes of transformers' modules: all experts of a layer in one, gate
    above up. Files have them where a ``state_dict()`` was saved as it is; the hub's have experts one by one.
    """
    rows: dict[str, tuple[tuple[int, ...], list[tuple[str, int | None, int]]]] = {}
    for mapped in mapped_parameters(arch, arch.vocab_size) if arch.experts else []:
        spec, head = mapped.spec, f"model.layers.{mapped.spec.layer}.mlp."
        if spec.expert is not None:
            name = head + ("experts.gate_up_proj" if "linear_fc1" in spec.name else "experts.down_proj")
            shape = (arch.num_experts, *spec.shape)
            rows.setdefault(name, (shape, []))[1].extend((s.hf_name, spec.expert, s.start) for s in mapped.segments)
        elif spec.name.endswith(".router.weight") and mapped.segments[0].hf_name != head + "gate.weight":
            rows[head + "gate.weight"] = (spec.shape, [(mapped.segments[0].hf_name, None, 0)])
    return {name: Fused(shape, tuple(parts)) for name, (shape, parts) in rows.items()}


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
