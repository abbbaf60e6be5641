"""megatron-core's own resharding planner on the same layouts: python -m rl3d.bench.megatron_planner MODEL TRAIN GEN GPUS.

Its plan is a pure function of metadata, so no process group is needed. The ranks sit as megatron-core puts them: tensor
parallel fastest, then data, then pipeline; generation groups are consecutive ranks.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rl3d.layout import GenLayout, GenMesh, Mesh, ShardLayout, TrainLayout


def main(model: str, train_text: str, gen_text: str, gpus: int) -> None:
    """Print one JSON object: seconds that every rank spends planning, bytes received and sent."""
    import torch
    from megatron.core.resharding import planner
    from megatron.core.resharding.utils import ParameterMetadata

    from rl3d.models import Architecture, parameter_specs
    from rl3d.models.shapes import find_model

    arch = Architecture.from_hf(find_model(model)[1])
    train, gen = TrainLayout.parse(train_text).resolve(gpus), GenLayout.parse(gen_text)
    specs = parameter_specs(arch, arch.padded_vocab(train.tp, gen.tp), "bfloat16")
    mesh = Mesh.of(train, gpus, ("tp", "dp", "pp"))
    sides = (
        (
            ShardLayout.training(mesh, arch.num_layers, zero=train.zero),
            _members(mesh.groups("tp")),
            _members(mesh.groups("dp")),
        ),
        _generation(GenMesh(gen.tp, tuple(range(gpus))), arch.num_layers),
    )

    def roster(side: tuple[ShardLayout, dict[int, list[int]], dict[int, list[int]]], rank: int) -> list[Any]:
        layout, tensor, data = side
        return [
            ParameterMetadata(
                name=s.name, resolved_name=s.name, shape=s.local_shape(layout.tp), dtype=torch.bfloat16, element_size=2,
                is_tp=s.dim is not None, partition_dim=s.dim or 0, partition_stride=max(len(s.blocks), 1), owner_rank=rank,
                tensor_parallel_group_ranks=tensor[rank], data_parallel_group_ranks=data[rank],
            )
            for s in specs if layout.holds(s, rank)
        ]  # fmt: skip

    rosters = [tuple(roster(side, rank) for side in sides) for rank in range(gpus)]
    start = time.process_time()
    destination, source = planner.index_metadata_rosters(rosters)
    planner.build_plan_from_rosters(destination, source, 0)
    seconds = time.process_time() - start
    received, sent = _bytes(planner._iter_global_transfer_ops(destination, source), gpus)
    print(json.dumps({"plan_seconds": seconds, "received": {"mean": sum(received) // gpus, "max": max(received)},
                      "sent": {"mean": sum(sent) // gpus, "max": max(sent)}}))  # fmt: skip


def _generation(mesh: GenMesh, layers: int) -> tuple[ShardLayout, dict[int, list[int]], dict[int, list[int]]]:
    replicas = [tuple(range(slot, len(mesh.ranks), mesh.tp)) for slot in range(mesh.tp)]
    return ShardLayout.generation(mesh, layers), _members(mesh.groups()), _members(replicas)


def _members(groups: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Rank -> the members of its group; ranks of a group share one list, as after megatron-core's gather."""
    return {rank: members for group in groups for members in [list(group)] for rank in members}


def _bytes(operations: Any, gpus: int) -> tuple[list[int], list[int]]:
    received, sent = [0] * gpus, [0] * gpus
    for _, to, origin, _, where, _, metadata in operations:
        if to != origin:
            sizes = [len(range(*part.indices(size))) for part, size in zip(where, metadata.shape, strict=True)]
            nbytes = math.prod(sizes) * metadata.element_size
            received[to] += nbytes
            sent[origin] += nbytes
    return received, sent


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
