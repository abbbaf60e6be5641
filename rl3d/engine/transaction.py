"""Operations of all ranks that happen everywhere or nowhere."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed.rollcall import LostRankError
from rl3d.reshard.transports.base import control_device


class SwitchError(RuntimeError):
    """A stage failed on another rank, and was taken back on all; the message names rank, stage and error."""


class Transaction:
    """Stages, carried out on all ranks in step; when one fails on any rank, all are taken back on every rank.

    After each stage the ranks agree by one small message on the host. What ``undo`` does must be possible whether its stage
    ran to its end or not.

    Args:
        name: of the whole, for messages.
        group: of all ranks, used by nothing else meanwhile; ``None``: the default group, if there is one.
        rank, device: this rank.
    """

    def __init__(self, name: str, group: Any, rank: int, device: torch.device):
        self.name, self.group, self.rank = name, group, rank
        self._control = control_device(group, device)
        self._undo: list[tuple[Callable[[], Any], bool]] = []

    def stage(self, name: str, do: Callable[[], Any], undo: Callable[[], Any] | None = None, *,
              together: bool = False, when: bool = True) -> Any:  # fmt: skip
        """Carry out ``do`` on this rank; its result when it succeeded on all ranks.

        ``together``: ``undo`` communicates, so that it is left out when a rank has gone. ``when``, the same on all ranks: no
        stage at all otherwise, and no message.

        Raises:
            LostRankError: the ranks could not agree; everything has been taken back here.
            SwitchError: it failed on other ranks only; everything has been taken back here as well.
            Exception: what ``do`` raised on this rank, likewise.
        """
        if not when:
            return None
        if undo is not None:
            self._undo.append((undo, together))
        error: Exception | None = None
        result = None
        try:
            result = do()
        except Exception as caught:  # whatever it is, the others must hear of it
            error = caught
        try:
            lines = self._agree(name, error)
        except Exception as lost:  # a rank has gone, or does not come: this one takes back what it did
            self._take_back(alone=True)
            first = next(iter(str(lost).splitlines()), type(lost).__name__)
            raise LostRankError(
                f"{self.name} was taken back here: the ranks could not agree after the stage {name!r} ({first})"
            ) from (error or lost)
        if not lines:
            return result
        self._take_back()
        if error is not None:
            raise error
        raise SwitchError(f"{self.name} was taken back on every rank: {'; '.join(lines[:4])}")

    def _agree(self, stage: str, error: Exception | None) -> list[str]:
        """What went wrong on any rank, in words."""
        mine = "" if error is None else f"rank {self.rank} failed to {stage}: {type(error).__name__}: {error}"
        if not (dist.is_available() and dist.is_initialized()):
            return [mine] if mine else []
        failed = torch.tensor([int(bool(mine))], dtype=torch.int64, device=self._control)
        dist.all_reduce(failed, group=self.group)
        if not failed.item():
            return []
        lines: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(lines, mine, group=self.group)
        return [line for line in lines if line]

    def _take_back(self, alone: bool = False) -> None:
        for undo, together in reversed(self._undo):
            if not (alone and together):
                undo()
        self._undo.clear()
