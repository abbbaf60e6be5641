"""The least that a switch could take: as many bytes from each peer as one contiguous copy out of its memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl3d.reshard.plan import Plan
from rl3d.reshard.transports.memory import attach, export, host_name


def from_peers(plan: Plan, rank: int) -> tuple[dict[int, int], int]:
    """Bytes that ``rank`` gets by ``plan`` from each other rank, and those that it has already."""
    runs = plan.segments
    mine = np.flatnonzero(runs.dst == rank)
    sources, at = np.unique(runs.src[mine], return_inverse=True)
    sizes = np.bincount(at.reshape(-1), (runs.stop - runs.start)[mine].astype(np.float64), minlength=len(sources))
    every = {int(peer): int(size) for peer, size in zip(sources, sizes, strict=True)}
    local = every.pop(rank, 0)
    return every, local


def plain_peer_copy(plan: Plan, rank: int, src: torch.Tensor, dst: torch.Tensor) -> Callable[[], None] | None:
    """A function that copies into ``dst`` what ``rank`` gets from its peers, out of the memory where they have ``src``, and
    what it has already out of its own; contents do not matter. Collective over the default group.

    Memory is mapped as :class:`~rl3d.reshard.transports.PeerTransport` maps it: CUDA IPC on a GPU, shared memory on a CPU.

    Args:
        src, dst: flat uint8; everything that a rank has under the layouts of ``plan``.

    Returns:
        ``None`` on all ranks, where one of them cannot map what it reads.
    """
    offered = _gather((host_name(), export(src.untyped_storage())))
    wanted, local = from_peers(plan, rank)
    copies, failed = [], False
    at = 0
    for peer, size in {**wanted, rank: local}.items():
        host, memory = offered[peer]
        try:
            if host != offered[rank][0]:
                raise OSError(f"rank {peer} is on another host")
            source = src if peer == rank else attach(memory, dst.device)
        except (OSError, RuntimeError):
            failed = True
            break
        while size:  # a layout with more padding than the other may have more to read than a peer has
            part = min(size, len(source), len(dst) - at)
            copies.append((dst[at : at + part], source[:part]))
            size, at = size - part, (at + part) % len(dst)
    if any(_gather(failed)):
        return None

    def run() -> None:
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    return run


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
