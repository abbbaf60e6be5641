"""How many elements a rank holds, by arithmetic that is cached: planning asks thousands of times."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from rl3d.layout import stage_layers
from rl3d.models import Architecture, parameter_specs


@dataclass(frozen=True)
class Places:
    """Elements of each parameter on one tensor-parallel rank: of a layer, of what the first and the last stage hold
    beside layers (a tied embedding is in both), and of both together where one stage is first and last."""

    layer: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    both: tuple[int, ...]


@lru_cache(maxsize=4096)
def places(arch: Architecture, padded_vocab: int, tp: int) -> Places:
    """See :class:`Places`."""
    specs = parameter_specs(replace(arch, num_layers=1), padded_vocab)
    sizes = [(spec, math.prod(spec.local_shape(tp))) for spec in specs]
    ends = [(spec.place, size) for spec, size in sizes if spec.layer is None]
    return Places(
        layer=tuple(size for spec, size in sizes if spec.layer is not None),
        first=tuple(size for place, size in ends if "pre" in place),
        last=tuple(size for place, size in ends if "post" in place),
        both=tuple(size for _, size in ends),
    )


@lru_cache(maxsize=4096)
def stage_numels(arch: Architecture, padded_vocab: int, tp: int, pp: int, vpp: int, stage: int) -> tuple[int, ...]:
    """Elements of every parameter that one rank of a pipeline stage holds."""
    found = places(arch, padded_vocab, tp)
    layers = found.layer * len(stage_layers(arch.num_layers, pp, vpp)[stage])
    if pp == 1:
        return layers + found.both
    return layers + (found.first if stage == 0 else ()) + (found.last if stage == pp - 1 else ())
