"""Functions that tests call on real ranks."""

from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed.bootstrap import Runtime


def one_fails(runtime: Runtime, culprit: int) -> None:
    if runtime.rank == culprit:
        raise ValueError(f"deliberate on rank {culprit}")
    dist.barrier()


def initialises_deepspeed(runtime: Runtime) -> dict[str, Any]:
    from rl3d.distributed import bootstrap

    bootstrap.init_deepspeed()
    bootstrap.init_deepspeed()
    import deepspeed.comm

    total = torch.ones(1)
    deepspeed.comm.all_reduce(total)
    return {"sum": total.item(), "world": deepspeed.comm.get_world_size()}
