"""A rank without torch: what a launcher does to its ranks, seen from outside. Usage: fake_rank.py MODE [DIR]."""

import os
import signal
import sys
import time
from pathlib import Path


def main(mode: str, directory: str = "") -> None:
    rank = int(os.environ["RANK"])
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if directory:
        (Path(directory) / f"pid{rank}").write_text(str(os.getpid()))
        while len(list(Path(directory).glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)  # nobody ends before everybody has begun
    if mode == "ok":
        print(f"rank {rank} of {os.environ['WORLD_SIZE']} on port {os.environ['MASTER_PORT']}")
    elif mode == "env":
        print(os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ["OMP_NUM_THREADS"])
    elif mode == "raise":
        if rank == 1:
            raise ValueError("deliberate")
        time.sleep(100)
    elif mode == "stubborn":
        if rank == 1:
            sys.exit(3)
        time.sleep(100)
    elif mode == "stopped":
        sys.exit(75)
    elif mode == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    elif mode == "sleep":
        time.sleep(100)


main(*sys.argv[1:])
