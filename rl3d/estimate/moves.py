"""One switch, planned and timed: from a model and two layouts to bytes, bounds and seconds."""

import time
from dataclasses import dataclass, replace
from typing import Any

from rl3d.estimate.time import MoveTime, predict_move
from rl3d.estimate.topology import Topology
from rl3d.layout import (
    GenLayout,
    LayoutError,
    Mesh,
    ShardLayout,
    TrainLayout,
    cut_problem,
    stage_layers,
    tp_sizes,
)
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard.mapping import MeshChoice, mesh_choices
from rl3d.reshard.plan import Plan
from rl3d.reshard.planner import build_plan
from rl3d.reshard.streams import bucket_bytes, places

STAGING_BYTES = 48 << 20
"""Most bytes in flight for each rank and direction, when nothing else is said (layout.staging_mib)."""


@dataclass(frozen=True)
class Move:
    """The planned switch from training to generation of one model on one cluster.

    ``groups`` are the generation groups; ``plan_seconds`` is what choosing the mesh and planning took.
    """

    train: TrainLayout
    gen: GenLayout
    choice: MeshChoice
    source: ShardLayout
    target: ShardLayout
    plan: Plan
    time: MoveTime
    plan_seconds: float
    staging_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Bytes (whole numbers), bounds, ratios and seconds, ready for ``json.dump``."""
        cert = self.plan.certificate.to_json()
        count = places(cert["buckets"], bool(self.plan.segments.relay.any()))

        def pair(name: str) -> dict[str, int]:
            return {"mean": round(cert[f"{name}_mean"]), "max": int(cert[f"{name}_max"])}

        return {
            "train": str(self.train), "gen": str(self.gen), "gpus": len(self.source.ranks),
            "order": list(self.choice.order), "gen_stride": self.choice.gen_stride,
            "received": pair("received"), "sent": pair("sent"), "aliased": cert["local"],
            "bounds": {
                "received": pair("bound"), "sent": {"max": cert["sent_bound"]},
                "ingress": {"max": max(cert["ingress_bound"])},
                "between": {"max": cert["between_bound"]}, "inside": {"max": cert["inside_bound"]},
            },
            "ratios": cert["ratios"], "between_nodes": cert["between_nodes"],
            "staging": {"cap": self.staging_bytes, "peak": count * cert["staging_peak"]},
            "seconds": self.time.seconds, "plan_seconds": self.plan_seconds, "hash": self.plan.hash,
        }  # fmt: skip


def check_layouts(arch: Architecture, train: TrainLayout, gen: GenLayout) -> None:
    """Raise :class:`LayoutError` for layouts that cannot cut the model, naming the sizes that can."""
    sizes = (arch.num_heads, arch.num_kv_heads, arch.ffn_size)
    for kind, layout in (("training", train), ("generation", gen)):
        if reason := cut_problem(layout.tp, *sizes):
            options = " or ".join(str(tp) for tp in tp_sizes(*sizes)[:8])
            raise LayoutError(f"{kind} layout {layout}: {reason}; choose tp {options}")
    try:
        stage_layers(arch.num_layers, train.pp, train.vpp)
    except LayoutError as error:
        raise LayoutError(f"training layout {train}: {error}") from None


def plan_move(
    arch: Architecture,
    train: TrainLayout,
    gen: GenLayout,
    world_size: int,
    topology: Topology,
    *,
    dtype: str = "bfloat16",
    staging_bytes: int = STAGING_BYTES,
) -> Move:
    """Choose the mesh, plan the switch and predict its seconds.

    Raises:
        LayoutError: a layout that the model or the number of ranks does not admit.
        TopologyError: ranks that do not fill the topology's nodes.
    """
    nodes = topology.nodes_of(world_size)
    train = train.resolve(world_size)
    gen.replicas(world_size)
    check_layouts(arch, train, gen)
    start = time.perf_counter()
    specs = parameter_specs(arch, arch.padded_vocab(train.tp, gen.tp), dtype)
    choice = min(mesh_choices(specs, train, gen, world_size, topology.gpus_per_node))
    mesh = Mesh.of(train, world_size, choice.order)
    source = ShardLayout.training(mesh, arch.num_layers, zero=train.zero, vpp=train.vpp, experts=arch.num_experts)
    target = ShardLayout.replicas(gen.tp, choice.gen_groups(gen.tp, world_size), arch.num_layers, experts=arch.num_experts)
    plan = build_plan(specs, source, target, staging_bytes=bucket_bytes(staging_bytes), nodes=nodes)
    seconds = time.perf_counter() - start
    return Move(train, gen, choice, source, target, plan, predict_move(plan, topology), seconds, staging_bytes)


def world_size_of(train: TrainLayout | None, gpus: int | None) -> int:
    """Number of GPUs: what was said, or what the training layout needs. Raises :class:`LayoutError` when unknown."""
    if gpus is not None:
        return gpus
    if train is None:
        raise LayoutError("the number of GPUs is not known; add --gpus N, or a training layout with dp (--train)")
    if train.dp is None:
        raise LayoutError(
            f"training layout {train}: dp is left out and so is the number of GPUs; write for example "
            f"{replace(train, dp=1)}, or add --gpus N"
        )
    return train.model_parallel * train.dp
