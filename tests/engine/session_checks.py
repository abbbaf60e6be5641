"""What test_session.py has the ranks of a session do."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def twice(function: Callable[..., Any]) -> list[Any]:
    """Call what the session lent, from two threads' worth of arguments."""
    return [function("ab"), function("ab", times=1)]


def stay(place: str) -> None:
    """Say where this rank is, and do not come back."""
    Path(f"{place}{dist.get_rank()}").touch()
    time.sleep(3600)


def die(rank: int) -> None:
    """One rank is killed; the others wait for it."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
