"""What megatron-core calls parameters in ``torch_dist`` files, in its own ("local") modules and with Transformer Engine.

Equal layers are stacked into one tensor [layers, ...] named without the layer's number; a model whose layers differ (dense
ones beside mixtures) keeps the numbers. Experts are stacked along the next dimension: [layers, experts, ...] or
[experts, ...]. A norm before a projection carries Transformer Engine's name, which fuses the two, and not where that has a
module for the norm alone: before a router, and before the projections of latent attention.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rl3d.layout import ParamSpec, split_expert_name

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LATENT = ".self_attention.linear_kv_down_proj."


class Stored(NamedTuple):
    """A tensor in the files, and where the parameter is in it: ``front`` of ``extent`` along dimensions in front."""

    name: str
    front: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()


class StoredNames:
    """Names of a model's parameters on disk.

    Args:
        specs: all parameters of the model.
    """

    def __init__(self, specs: Sequence[ParamSpec]):
        self._layers = 1 + max((s.layer for s in specs if s.layer is not None), default=-1)
        self._experts = 1 + max((s.expert for s in specs if s.expert is not None), default=-1)
        self._sparse = {s.layer for s in specs if s.expert is not None}
        self._latent = any(_LATENT in s.name for s in specs)
        self._alike = len(self._sparse) in (0, self._layers)

    def written(self, spec: ParamSpec) -> tuple[Stored, ...]:
        """The tensor to write the parameter as. A second name for the same bytes where local modules and Transformer
        Engine's look for different ones."""
        return tuple(self._place(spec, rest, self._alike) for rest in self._rests(spec))

    def readable(self, spec: ParamSpec) -> list[Stored]:
        """Every tensor that files in use hold the parameter in, the usual one first."""
        rests = list(dict.fromkeys((*self._rests(spec), *self._other_names(spec))))
        return [self._place(spec, rest, stacked) for stacked in (True, False) for rest in rests]

    def _rests(self, spec: ParamSpec) -> tuple[str, ...]:
        """Names without the layer."""
        rest = _rest(spec)
        if spec.layer is None:
            return (rest,)
        if not self._latent:
            fused = _FUSED_NORMS.get(rest, rest)  # local modules say so even before a router
            return (fused, rest) if fused != rest and "mlp" in fused and spec.layer in self._sparse else (fused,)
        fused = _LATENT_NORMS.get(rest, rest)
        return (rest,) if spec.layer in self._sparse and "mlp" in fused else tuple(dict.fromkeys((rest, fused)))

    def _other_names(self, spec: ParamSpec) -> list[str]:
        rest = _rest(spec)
        return [rest, *(table[rest] for table in (_FUSED_NORMS, _LATENT_NORMS) if rest in table)]

    def _place(self, spec: ParamSpec, rest: str, stacked: bool) -> Stored:
        if spec.layer is None:
            return Stored(rest)
        index, extent = ((spec.layer,), (self._layers,)) if stacked else ((), ())
        head = "decoder.layers." if stacked else f"decoder.layers.{spec.layer}."
        if spec.expert is not None:
            index, extent = (*index, spec.expert), (*extent, self._experts)
        return Stored(head + rest, index, extent)


def _rest(spec: ParamSpec) -> str:
    """The canonical name without the layer; an expert's without its number, in the module that holds all of them."""
    if spec.layer is None:
        return spec.name
    rest = spec.name.removeprefix(f"decoder.layers.{spec.layer}.")
    found = split_expert_name(rest)
    return rest if found is None else found[0].replace(".experts.", ".experts.experts.")
