"""What is checked at a switch: that weights are numbers, and that a move changed none of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl3d.config.sections import VERIFY_LEVELS
from rl3d.engine.transaction import SwitchError
from rl3d.layout import ParamSpec

SAMPLED_SHARE = 16
"""``sampled`` looks at every 16th parameter, others at each switch: after 16 switches it has seen all."""


class NonFiniteWeightsError(SwitchError):
    """Weights that are NaN or infinite are not handed to generation; the message names them."""


def check_level(level: str | bool) -> str:
    """One of ``off``, ``sampled``, ``full``; booleans mean off and full. Raises ValueError for anything else."""
    if isinstance(level, bool):
        return "full" if level else "off"
    if level not in VERIFY_LEVELS:
        raise ValueError(f"verify = {level!r}: expected one of {', '.join(VERIFY_LEVELS)}")
    return level


def chosen(specs: Sequence[ParamSpec], level: str, turn: int) -> list[ParamSpec]:
    """Parameters to look at in the switch number ``turn``, the same on every rank."""
    if level == "off":
        return []
    return list(specs) if level == "full" else list(specs[turn % min(SAMPLED_SHARE, len(specs)) :: SAMPLED_SHARE])


@torch.no_grad()
def check_finite(weights: Mapping[str, Tensor], rank: int) -> None:
    """Raise NonFiniteWeightsError unless all of this rank's weights are finite: one pass, one wait for the device."""
    names = [name for name, t in weights.items() if t.is_floating_point() and t.numel()]
    if not names:
        return
    # the largest magnitude of each: a NaN stays one through the maximum
    largest = torch._foreach_norm([weights[name].detach() for name in names], ord=float("inf"))
    good = torch.stack([value.float() for value in largest]).isfinite().tolist()
    bad = [name for name, fine in zip(names, good, strict=True) if not fine]
    if bad:
        counts = [f"{name} ({int((~weights[name].isfinite()).sum())} of {weights[name].numel()} values)" for name in bad[:4]]
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise NonFiniteWeightsError(
            f"rank {rank}: weights that are NaN or infinite are not handed to generation: {', '.join(counts)}{more}; lower "
            f"the learning rate or go back to a checkpoint"
        )
