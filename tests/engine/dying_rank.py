"""A rank of test_lost_rank.py: switches, and one of the ranks dies in the middle. Usage: dying_rank DIRECTORY VICTIM."""

import os
import signal
import sys
import time

from rl3d import Actor
from rl3d.distributed import bootstrap, platform


def main(directory: str, victim: int) -> None:
    platform.prepare()
    runtime = bootstrap.init(timeout_s=60, device="cpu")
    store = runtime.new_store()
    actor = Actor(directory, train="tp1.pp1.zero1", gen="tp1", alias="off", transport="p2p", timeout_s=60)
    actor.switch_to_generation()
    actor.switch_to_training()
    if runtime.rank == victim:
        mover = actor.hybrid._movers.whole(actor.hybrid.side)
        mover.run = lambda: os.kill(os.getpid(), signal.SIGKILL)
    try:
        actor.switch_to_generation()
        outcome = "no error"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(f"outcome of rank {runtime.rank} in {actor.hybrid.mode} mode: {outcome}", flush=True)
    if victim != 0:
        store.add("told", 1)
        end = time.monotonic() + 60
        while runtime.rank == 0 and store.add("told", 0) < runtime.world_size - 1 and time.monotonic() < end:
            time.sleep(0.05)  # as failures.guard does: rank 0 keeps the store, and the others still read in it
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
