"""Which rank's file holds which piece of a parameter in a Megatron checkpoint of a layout: as that layout would save it.

``torch_dist`` loads at any layout from any pieces. Where they are cut for the layout that will load them, each rank reads
its own files only.
"""

from typing import NamedTuple

from rl3d.layout import LayoutError, ParamSpec, stage_layers


class Region(NamedTuple):
    """A box of a parameter (``spec.shape``) and the rank whose file holds it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Placement:
    """Tensor-, pipeline- and expert-parallel sizes; ranks count as megatron-core's, tensor parallelism fastest.

    Raises:
        LayoutError: fewer layers than stages, or experts that do not divide.
    """

    def __init__(self, layers: int, tp: int = 1, pp: int = 1, ep: int = 1, experts: int = 0):
        if ep > 1 and (not experts or experts % ep):
            raise LayoutError(f"the model's {experts} experts do not divide by ep = {ep}")
        self.tp, self.pp, self.ep, self._experts = tp, pp, ep, experts
        self._stage = {layer: s for s, held in enumerate(stage_layers(layers, pp)) for layer in held}

    def __str__(self) -> str:
        return f"tp{self.tp}.pp{self.pp}" + (f".ep{self.ep}" if self.ep > 1 else "")

    def regions(self, spec: ParamSpec) -> list[Region]:
        """Every value once. Raises :class:`LayoutError` when a dimension does not divide by tp."""
        if spec.layer is not None:
            stage = self._stage[spec.layer]
        else:
            stage = 0 if "pre" in spec.place else self.pp - 1
        expert = 0 if spec.expert is None else spec.expert * self.ep // self._experts
        first = (stage * self.ep + expert) * self.tp
        zeros = (0,) * len(spec.shape)
        if spec.dim is None or self.tp == 1:
            return [Region(first, zeros, spec.shape)]
        out = []
        for slot in range(self.tp):
            for piece in spec.pieces(self.tp, slot):
                offsets, sizes = list(zeros), list(spec.shape)
                offsets[spec.dim], sizes[spec.dim] = piece.global_start, piece.length
                out.append(Region(first + slot, tuple(offsets), tuple(sizes)))
        return out
