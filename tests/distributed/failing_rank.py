"""A guarded rank for `python -m`, torchrun, deepspeed and srun. Usage: failing_rank MODE [DEVICE]."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from rl3d.distributed import bootstrap, failures, platform


def main(mode: str, device: str = "cpu") -> None:
    platform.prepare()
    runtime = bootstrap.init(timeout_s=60, device=device)
    with failures.guard(runtime):
        total = torch.ones(1, device=runtime.device)
        dist.all_reduce(total)
        line = f"rank {runtime.rank}/{runtime.world_size} local {runtime.local_rank} nodes {runtime.nodes} ok\n"
        os.write(sys.stdout.fileno(), line.encode())  # in one piece: an unbuffered print writes its line's end by itself
        if mode == "raise" and runtime.rank == 1:
            raise ValueError("deliberate")
        if mode == "rank0" and runtime.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "ok":
            time.sleep(0.3 * runtime.rank)  # ranks end one after another
            return
        if runtime.rank == runtime.world_size - 1:
            time.sleep(300)  # not in a collective: only the watcher can end it
        dist.barrier()
        torch.cuda.synchronize()  # under NCCL the barrier is only queued so far


if __name__ == "__main__":
    main(*sys.argv[1:])
