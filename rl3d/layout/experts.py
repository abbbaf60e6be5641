"""Experts of a mixture: where expert parallelism puts them, and what the two flavours of megatron-core call them."""

import re
from typing import NamedTuple

from rl3d.layout.parallel import LayoutError

_LOCAL = re.compile(r"(?P<head>.*\.experts\.)local_experts\.(?P<expert>\d+)\.(?P<rest>linear_fc[12]\.\w+)")
_GROUPED = re.compile(r"(?P<head>.*\.experts\.)(?P<rest>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)")


def split_expert_name(name: str) -> tuple[str, int] | None:
    """(name without the index, expert index) of an expert's parameter; ``None`` for any other parameter.

    Reads ``...experts.local_experts.3.linear_fc1.weight`` (the local specification, sequential experts) and
    ``...experts.linear_fc1.weight3`` (Transformer Engine's grouped linear layers); both give
    ``("...experts.linear_fc1.weight", 3)``.
    """
    match = _LOCAL.fullmatch(name) or _GROUPED.fullmatch(name)
    return None if match is None else (match["head"] + match["rest"], int(match["expert"]))


def expert_name(name: str, expert: int, *, grouped: bool) -> str:
    """The parameter's name for expert ``expert``: grouped (Transformer Engine) or local.

    ``name`` is what :func:`split_expert_name` gives, or either flavour's name of any expert.
    """
    base = (split_expert_name(name) or (name, 0))[0]
    head, found, rest = base.rpartition(".experts.")
    if not found:
        raise LayoutError(f"{name}: not a parameter of an expert; expected '.experts.' in its name")
    return f"{base}{expert}" if grouped else f"{head}{found}local_experts.{expert}.{rest}"


class ExpertGrid(NamedTuple):
    """How the tensor- and data-parallel ranks of one stage hold experts.

    The ``tp x dp`` ranks of a stage, tensor parallelism fastest, form a second grid of expert-tensor (fastest), expert
    and expert-data parallelism: megatron-core's order ``tp-cp-ep-dp-pp``. Expert-parallel rank ``e`` holds the experts
    from ``e * experts / ep`` on.
    """

    experts: int
    ep: int
    tp: int
    dp: int

    @classmethod
    def of(cls, name: str, ranks: int, experts: int, ep: int, tp: int) -> "ExpertGrid":
        """Raises :class:`LayoutError` where experts or ranks do not divide."""
        if experts % ep:
            raise LayoutError(f"layout {name}: {experts} experts do not divide by ep = {ep}")
        if ranks % (ep * tp):
            raise LayoutError(
                f"layout {name}: the {ranks} tensor- and data-parallel ranks of a stage do not divide by ep x expert tp "
                f"= {ep} x {tp}"
            )
        return cls(experts, ep, tp, ranks // (ep * tp))

    def place(self, index: int) -> tuple[int, int, int]:
        """(expert-tensor, expert, expert-data) coordinates of a rank of the stage."""
        return index % self.tp, index // self.tp % self.ep, index // (self.tp * self.ep)

    def home(self, expert: int) -> int:
        """Expert-parallel rank that holds ``expert``."""
        return expert * self.ep // self.experts
