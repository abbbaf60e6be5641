"""How many pages the key/value pool gets.

- ``full``: every slot can hold the longest sequence, and the pool stays while training.
- ``adaptive``: the slots can hold the longest sequences of the batch at hand; freed while training.
- ``lightweight``: a quarter of that, freed after every batch; sequences that run out of pages are computed again.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

CacheStrategy = Literal["full", "adaptive", "lightweight"]
STRATEGIES: tuple[str, ...] = get_args(CacheStrategy)
FREE_SHARE = 0.9  # of the device's free memory that a pool may take; activations of a prefill need the rest
_LIGHT = 4


def wanted_pages(strategy: str, needs: Sequence[int], page_size: int, max_sequences: int, longest: int) -> int:
    """Pages that a batch is to have; ``needs`` are the most tokens of each of its sequences.

    Never fewer than its longest sequence takes.
    """
    pages = sorted((-(-need // page_size) for need in needs), reverse=True)
    if strategy == "full":
        return max_sequences * -(-longest // page_size)
    total = sum(pages[:max_sequences])
    if strategy == "lightweight":
        total = max(-(-total // _LIGHT), max(pages, default=0))
    return total


def affordable_pages(page_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> int | None:
    """Pages that fit into the free memory of every rank of a replica; ``None`` on a CPU. Collective on CUDA.

    Memory that torch keeps for itself counts as free when it is in no use.
    """
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    pages = int(free * FREE_SHARE) // page_bytes
    if group is not None:
        least = torch.tensor([pages], device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        pages = int(least)
    return pages
