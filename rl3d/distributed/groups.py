"""Process groups of the training and the generation layout.

Every group is made before the first step, on all ranks in one global order; groups with the same members are shared.
``torch.distributed.new_group`` sorts its ranks, and megatron-core takes the position in the group as the shard index:
meshes therefore only ever ask for groups in which the coordinate rises with the rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rl3d.layout import LayoutError, Mesh

if TYPE_CHECKING:
    from rl3d.distributed.bootstrap import Runtime


class GroupRegistry:
    """Makes each group once. All ranks must ask for the same groups in the same order (a collective call)."""

    def __init__(self, timeout_s: float, backend: str | None = None):
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = backend
        self._groups: dict[tuple[int, ...], Any] = {}

    @classmethod
    def of(cls, runtime: "Runtime", purpose: str) -> "GroupRegistry":
        """The job's registry for ``purpose``: a second actor finds the groups of the first. A communicator of NCCL
        costs device memory for as long as the job lives, and groups of different purposes may be in use at once."""
        if purpose not in runtime.registries:
            runtime.registries[purpose] = cls(runtime.timeout_s)
        return runtime.registries[purpose]

    def all_of(self, groups: Iterable[tuple[int, ...]]) -> Any:
        """Make all ``groups`` and return the one that holds this rank (``None`` when none does)."""
        mine = None
        for ranks in groups:
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend)
            if dist.get_rank() in ranks:
                mine = self._groups[ranks]
        return mine


@dataclass(frozen=True)
class ModelGroups:
    """The groups that one model lives in, seen from this rank, with its coordinates.

    ``mp`` spans tp x pp (one copy of the model); ``embd`` joins the first and the last stage when the embedding is
    tied; ``single`` holds this rank alone and stands for every dimension that rl3d does not split. ``vpp`` is the number
    of chunks of layers on each stage.
    """

    tp: Any
    pp: Any
    dp: Any
    mp: Any
    embd: Any
    single: Any
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    vpp: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def pg_collection(self) -> Any:
        """megatron-core's view of these groups (``ProcessGroupCollection``)."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection = ProcessGroupCollection()
        groups = {
            "tp": self.tp, "pp": self.pp, "mp": self.mp, "dp": self.dp, "embd": self.embd, "pos_embd": self.single,
            "cp": self.single, "tp_cp": self.tp, "hcp": [self.single], "ep": self.single, "expt_tp": self.single,
            "tp_ep": self.tp, "tp_ep_pp": self.mp, "dp_cp": self.dp, "tp_dp_cp": self.dp, "expt_dp": self.dp,
            "intra_dp_cp": self.dp, "intra_expt_dp": self.dp,
        }  # fmt: skip
        for name, group in groups.items():
            setattr(collection, name, group)
        return collection


def training_groups(mesh: Mesh, registry: GroupRegistry, vpp: int = 1) -> ModelGroups:
    """Groups of a training mesh whose stages hold ``vpp`` chunks each (collective).

    Raises:
        LayoutError: the world does not match the mesh.
    """
    if dist.get_world_size() != mesh.world_size:
        raise LayoutError(f"the mesh has {mesh.world_size} ranks, but {dist.get_world_size()} were started")
    coord = mesh.coords(dist.get_rank())
    single = registry.all_of([(rank,) for rank in range(mesh.world_size)])
    tp, pp, dp = (registry.all_of(mesh.groups(axis)) for axis in ("tp", "pp", "dp"))
    mp = registry.all_of(mesh.groups("tp", "pp"))
    ends = tuple(tuple(sorted({ranks[0], ranks[-1]})) for ranks in mesh.groups("pp"))
    embd = registry.all_of(ends)
    return ModelGroups(
        tp=tp, pp=pp, dp=dp, mp=mp, embd=embd, single=single,
        tp_rank=coord.tp, tp_size=mesh.tp, pp_rank=coord.pp, pp_size=mesh.pp, dp_rank=coord.dp, dp_size=mesh.dp,
        vpp=vpp,
    )  # fmt: skip


def generation_groups(replicas: Sequence[tuple[int, ...]], registry: GroupRegistry) -> ModelGroups | None:
    """Groups of tensor-parallel replicas (collective); ``None`` on ranks that take no part in generation.

    ``dp_rank`` is the replica's index. A rank's slot is its position in its replica, whose ranks must rise.
    """
    single = registry.all_of([(rank,) for rank in range(dist.get_world_size())])
    tp = registry.all_of(replicas)
    rank = dist.get_rank()
    replica = next((i for i, ranks in enumerate(replicas) if rank in ranks), None)
    if replica is None:
        return None
    ranks = replicas[replica]
    if list(ranks) != sorted(ranks):
        raise LayoutError(f"generation replica {ranks} must list its ranks in rising order: groups sort their members")
    return ModelGroups(
        tp=tp, pp=single, dp=single, mp=tp, embd=None, single=single,
        tp_rank=ranks.index(rank), tp_size=len(ranks), pp_rank=0, pp_size=1, dp_rank=replica, dp_size=len(replicas),
    )  # fmt: skip
