"""A rank without torch: what a launcher does to its ranks, seen from outside. Usage: fake_rank.py MODE [DIR]."""

import os
import signal
import sys
import time
from pathlib import Path


def main(mode: str, directory: str = "") -> None:
    rank = int(os.environ["RANK"])
    if directory:
        (Path(directory) / f"pid{rank}").write_text(str(os.getpid()))
    if mode == "ok":
        print(f"rank {rank} of {os.environ['WORLD_SIZE']} on port {os.environ['MASTER_PORT']}")
    elif mode == "env":
        print(os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ["OMP_NUM_THREADS"])
    elif mode == "raise":
        if rank == 1:
            raise ValueError("deliberate")
        time.sleep(60)
    elif mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            sys.exit(3)
        time.sleep(60)
    elif mode == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    elif mode == "sleep":
        time.sleep(60)


main(*sys.argv[1:])
