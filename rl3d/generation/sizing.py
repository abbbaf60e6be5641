"""How many pages the key/value pool gets.

- ``full``: every slot can hold the longest sequence, and the pool stays while training.
- ``adaptive``: the slots can hold the longest sequences of the batch at hand; freed while training.
- ``lightweight``: a quarter of that, freed after every batch; sequences that run out of pages are computed again.

Freed is the memory, not the address (:mod:`rl3d.generation.elastic`): captured decode steps outlive it.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

from rl3d.generation.kv_cache import KVCache
from rl3d.utils import device_memory

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


def affordable_pages(cache: KVCache, wanted: int, device: torch.device, group: dist.ProcessGroup | None) -> int | None:
    """Of ``wanted`` pages, page 0 included, those for which every rank of a replica has memory; ``None`` on a CPU.

    Collective on CUDA. Memory that torch keeps and nobody uses counts as free, and so does what the cache has already; a
    cap on torch's allocator is one on both.
    """
    if device.type != "cuda":
        return None
    if cache.elastic is None:  # torch's own, which it need not give back first
        free = device_memory.available_bytes(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        pages = cache.pages_in(int(free * FREE_SHARE))
    else:
        more = cache.bytes_of(wanted) - cache.nbytes
        free = device_memory.available_bytes(device, more / FREE_SHARE)
        pages = cache.pages_in(cache.nbytes + int(free * FREE_SHARE))
    pages = min(pages, wanted)
    if group is not None:
        least = torch.tensor([pages], device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        pages = int(least)
    return pages
