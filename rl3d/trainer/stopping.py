"""Ending a run between two steps because its scheduler says that time is up; the same command goes on from there."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import notice
from rl3d.distributed.bootstrap import Runtime


class StopRequest:
    """Listens for SIGUSR1, which schedulers send ahead of the end (``sbatch --signal=USR1@300``), while it is entered.

    One rank that hears it is enough. Outside the main thread, where Python hears no signals, nothing is listened for.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._hear)
            self._asked |= notice.early.is_set()
            notice.early.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._before or signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective over all ranks."""
        asked = torch.tensor(int(self._asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._runtime.cpu_group)
        return bool(asked)
