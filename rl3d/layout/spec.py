"""Parameter specifications: the global shape of a parameter and how tensor parallelism cuts it.

Everything is arithmetic on global indices; nothing is guessed from module classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl3d.layout.parallel import LayoutError


class Piece(NamedTuple):
    """A run along the cut dimension: ``length`` indices from ``global_start`` land at ``local_start`` of a shard."""

    global_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter under its canonical (Megatron, global layer index) name.

    Attributes:
        name: canonical name, e.g. ``decoder.layers.3.mlp.linear_fc1.weight``.
        shape: global shape at TP = 1, with the padded vocabulary.
        dim: dimension cut by tensor parallelism (0 column, 1 row) or ``None`` when every TP rank holds all of it.
        blocks: sizes along ``dim`` that are cut separately, each in tp equal parts. ``(ffn, ffn)`` for a fused
            gate/up projection: a plain cut would give rank 0 all of the gate (Megatron-LM issue 360).
        layer: global layer index, or ``None`` outside the layers.
        place: ``"layer"``, ``"pre"`` (first stage), ``"post"`` (last stage) or ``"pre+post"`` (tied embedding: held
            by both the first and the last stage).
        dtype: torch dtype name without the module, e.g. ``"bfloat16"``.
        valid_rows: rows along dimension 0 that carry values; the rest pads the vocabulary.
        expert: global index of the expert that the parameter belongs to, or ``None``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    blocks: tuple[int, ...] = ()
    layer: int | None = None
    place: str = "layer"
    dtype: str = "float32"
    valid_rows: int | None = None
    expert: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None:
            if not self.blocks:
                object.__setattr__(self, "blocks", (self.shape[self.dim],))
            if sum(self.blocks) != self.shape[self.dim]:
                raise LayoutError(
                    f"{self.name}: blocks {self.blocks} add up to {sum(self.blocks)}, expected {self.shape[self.dim]}"
                )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one rank's shard. Raises :class:`LayoutError` when a block does not divide by ``tp``."""
        if self.dim is None:
            return self.shape
        for block in self.blocks:
            if block % tp:
                raise LayoutError(f"{self.name}: {block} along dimension {self.dim} does not divide by tp = {tp}")
        return tuple(size // tp if i == self.dim else size for i, size in enumerate(self.shape))

    def pieces(self, tp: int, index: int) -> tuple[Piece, ...]:
        """Runs along ``dim`` that shard ``index`` of ``tp`` holds; one per block, none when replicated."""
        if self.dim is None:
            return ()
        self.local_shape(tp)
        out, start, local = [], 0, 0
        for block in self.blocks:
            part = block // tp
            out.append(Piece(start + index * part, local, part))
            start += block
            local += part
        return tuple(out)

    def on_stage(self, stage: int, layers: Sequence[Sequence[int]]) -> bool:
        """Whether pipeline stage ``stage`` holds this parameter, given the layers of each stage."""
        if self.layer is not None:
            return self.layer in layers[stage]
        first, last = stage == 0, stage == len(layers) - 1
        return ("pre" in self.place and first) or ("post" in self.place and last)
