"""Moving weights between layouts: planner (pure), plan (data), executor, fingerprints.

Names load on first use: planning needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl3d.reshard.cache import cached_plan
    from rl3d.reshard.executor import MoveReport, Resharder, apply_plan_inprocess
    from rl3d.reshard.fingerprint import (
        combine,
        compare,
        fingerprint_shards,
        fingerprint_tensor,
        fold,
        local_fingerprints,
        replica_differences,
        replicas_equal,
    )
    from rl3d.reshard.mapping import MeshChoice, choose_mesh_order, mesh_choices
    from rl3d.reshard.plan import Certificate, Plan, ReshardError
    from rl3d.reshard.planner import build_plan

_HOME = {
    "cached_plan": "cache",
    "MoveReport": "executor", "Resharder": "executor", "apply_plan_inprocess": "executor",
    "combine": "fingerprint", "compare": "fingerprint", "fingerprint_shards": "fingerprint",
    "fingerprint_tensor": "fingerprint", "fold": "fingerprint", "local_fingerprints": "fingerprint",
    "replica_differences": "fingerprint", "replicas_equal": "fingerprint", "MeshChoice": "mapping",
    "choose_mesh_order": "mapping", "mesh_choices": "mapping", "Certificate": "plan", "Plan": "plan",
    "ReshardError": "plan", "build_plan": "planner",
}  # fmt: skip

__all__ = [
    "Certificate", "MeshChoice", "MoveReport", "Plan", "ReshardError", "Resharder", "apply_plan_inprocess",
    "build_plan", "cached_plan", "choose_mesh_order", "combine", "compare", "fingerprint_shards", "fingerprint_tensor",
    "fold", "local_fingerprints", "mesh_choices", "replica_differences", "replicas_equal",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"rl3d.reshard.{_HOME[name]}"), name)
    raise AttributeError(f"module 'rl3d.reshard' has no attribute {name!r}")
