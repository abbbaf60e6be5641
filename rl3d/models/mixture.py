"""Mixtures of experts in numbers and parameters: enough to plan their moves. They are not trained yet."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rl3d.layout import ParamSpec, expert_name
from rl3d.models.architecture import Architecture
from rl3d.models.families import parameter_specs

_MIXTRAL = {
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
}


@dataclass(frozen=True)
class Mixture(Architecture):
    """A decoder whose MLPs are ``num_experts`` experts behind a router; a token passes through ``active_experts``."""

    num_experts: int = 8
    active_experts: int = 2

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, all experts counted, a tied embedding once."""
        expert = 3 * self.hidden_size * self.ffn_size
        router = self.num_experts * self.hidden_size
        return super().num_parameters + self.num_layers * ((self.num_experts - 1) * expert + router)


def planned_architecture(config: Mapping[str, Any]) -> Architecture:
    """What can be planned: every architecture that can be trained, and mixtral.

    Raises :class:`UnsupportedModelError` for anything else.
    """
    if config.get("model_type") != "mixtral":
        return Architecture.from_hf(config)
    # mixtral is a llama whose MLP is repeated behind a router
    dense = {key: value for key, value in config.items() if key not in _MIXTRAL} | {"model_type": "llama"}
    llama = Architecture.from_hf(dense)
    values = {field.name: getattr(llama, field.name) for field in fields(llama)} | {"family": "mixtral"}
    return Mixture(
        **values,
        num_experts=config.get("num_local_experts", 8),
        active_experts=config.get("num_experts_per_tok", 2),
    )


def planned_specs(arch: Architecture, padded_vocab: int, dtype: str = "float32") -> list[ParamSpec]:
    """Specifications of all parameters, in layer order; experts under megatron-core's local names."""
    if not isinstance(arch, Mixture):
        return parameter_specs(arch, padded_vocab, dtype)
    values = {field.name: getattr(arch, field.name) for field in fields(Architecture)} | {"family": "llama"}
    out: list[ParamSpec] = []
    for spec in parameter_specs(Architecture(**values), padded_vocab, dtype):
        head, found, rest = spec.name.partition(".mlp.linear_")
        if not found:
            out.append(spec)
            continue
        if rest.startswith("fc1"):
            shape = (arch.num_experts, arch.hidden_size)
            out.append(ParamSpec(f"{head}.mlp.router.weight", shape, None, layer=spec.layer, dtype=dtype))
        for expert in range(arch.num_experts):
            name = expert_name(f"{head}.mlp.experts.linear_{rest}", expert, grouped=False)
            out.append(ParamSpec(name, spec.shape, spec.dim, spec.blocks, spec.layer, dtype=dtype, expert=expert))
    return out
