"""The layout of what each data-parallel rank has updated at ZeRO stages 1 and 2, compared with what DeepSpeed holds."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rl3d.engine.training import TrainingEngine
from rl3d.layout import LayoutError, Mesh, ParamSpec, ShardLayout
from rl3d.models import Architecture
from rl3d.models.build import canonical_parameters


def partition_layout(engine: TrainingEngine, mesh: Mesh, arch: Architecture, specs: Sequence[ParamSpec], *,
                     vpp: int, group: Any) -> ShardLayout:  # fmt: skip
    """:meth:`ShardLayout.partitions` of a training engine. Collective over ``group``, all ranks.

    Raises:
        LayoutError: on every rank, when DeepSpeed's flat buffer on any rank is laid out otherwise (settings such as
            ``round_robin_gradients`` or ``parameter_alignment``).
    """
    groups = engine.groups
    parameters = canonical_parameters(engine.model, arch, groups)
    orders = _gathered((groups.pp_rank, list(parameters)), group)
    order = list(dict.fromkeys(name for _, names in sorted(orders) for name in names))
    layout = ShardLayout.partitions(mesh, arch.num_layers, specs, vpp=vpp, groups=[order])
    assert layout.flat is not None
    flats, problem = engine.zero.flat_weights(), ""
    if len(flats) != 1:
        problem = f"DeepSpeed has {len(flats)} flat buffers, expected one"
    for name, parameter in parameters.items():
        place = groups.pp_rank, name
        offset = (parameter.data_ptr() - flats[0].data_ptr()) // parameter.element_size()
        length = flats[0].numel() // groups.dp_size
        expected = layout.flat.offset[place], layout.flat.length[place]
        if not problem and (offset, length) != expected:
            problem = (
                f"{name} starts at {offset} in partitions of {length} elements, expected {expected[0]} and {expected[1]}"
            )
    problems = [text for text in _gathered(problem, group) if text]
    if problems:
        raise LayoutError(
            f"defer_gather: DeepSpeed lays out its partitions in another way than rl3d knows: {problems[0]}; leave "
            f"defer_gather or the settings in deepspeed.zero_optimization out"
        )
    return layout


def _gathered(value: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out
