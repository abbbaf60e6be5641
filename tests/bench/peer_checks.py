"""What the plain copy of ``rl3d bench switch`` brings, on real ranks."""

from typing import Any

import torch
import torch.distributed as dist

import rl3d.bench.peer_copy as module
from rl3d.layout import Mesh, ParamSpec, ShardLayout
from rl3d.reshard import build_plan


def main(runtime: Any) -> dict[str, Any]:
    """A matrix of 64 x 32 bytes, rows cut over the ranks, wanted whole by each; memory is full of the rank's number + 1."""
    rank, world, device = runtime.rank, runtime.world_size, runtime.device
    spec = ParamSpec("w", (64, 32), 0, layer=0, dtype="int8")
    source = ShardLayout.training(Mesh(world, 1, 1), 1)
    plan = build_plan([spec], source, ShardLayout.replicas(1, [(r,) for r in range(world)], 1))
    src = torch.full((64 * 32 // world,), rank + 1, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        src.share_memory_()
    dst = torch.zeros(64 * 32, dtype=torch.uint8, device=device)

    def copied() -> list[int]:
        run = module.plain_peer_copy(plan, rank, src, dst)
        assert run is not None
        dist.barrier()
        run()
        dist.barrier()  # nobody changes what another still reads
        return torch.bincount(dst.cpu().long(), minlength=world + 1).tolist()

    once = copied()
    src.fill_(rank + 2)  # nothing was kept from before: the mapped memory is the peer's own
    again = copied()
    dist.barrier()
    original = module.attach
    if rank == world - 1:

        def refuse(exported: Any, device: torch.device) -> Any:
            raise OSError("not permitted here")

        module.attach = refuse
    refused = module.plain_peer_copy(plan, rank, src, dst) is None
    module.attach = original
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (once, again, refused))
    return {"found": everyone, "wanted": module.from_peers(plan, rank)}
