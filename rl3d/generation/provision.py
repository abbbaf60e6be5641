"""The pages of one replica and the memory under them: made for a batch, grown for a larger one, given back."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rl3d.generation.engine import GenerationError
from rl3d.generation.kv_cache import KVCache
from rl3d.generation.pages import PagePool
from rl3d.generation.sizing import STRATEGIES, affordable_pages, wanted_pages


class Provision:
    """Pools for at most ``max_sequences`` sequences of ``longest`` tokens, as large as a strategy says.

    All ranks of a replica make the same calls. Constructing is collective, too.

    Args:
        strategy: see :mod:`rl3d.generation.sizing`.
        fixed_pages: that many pages instead, whatever the batch.
        layers, kv_heads, head_dim, dtype: of the cache on this rank.

    Attributes:
        pool: who holds which page.
        cache: their keys and values.

    Raises:
        ValueError: no such strategy.
    """

    def __init__(self, strategy: str, fixed_pages: int | None, *, page_size: int, max_sequences: int, longest: int,
                 layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
                 group: dist.ProcessGroup | None) -> None:  # fmt: skip
        if strategy not in STRATEGIES:
            raise ValueError(f"generator: cache_strategy = {strategy!r}, expected one of {', '.join(STRATEGIES)}")
        self.strategy, self.fixed_pages = strategy, fixed_pages
        self.max_sequences, self.longest = max_sequences, longest
        self.device, self.group = device, group
        self.pool = PagePool(fixed_pages or 0, page_size)
        capacity = fixed_pages or wanted_pages("full", (), page_size, max_sequences, longest)
        self.cache = KVCache(layers, kv_heads, head_dim, page_size=page_size, pages=self.pool.pages, capacity=capacity,
                             dtype=dtype, device=device)  # fmt: skip
        self.cache.agree(group)
        self._wanted = 0  # pages, whether memory allowed them or not

    @property
    def stays(self) -> bool:
        """Whether training leaves the memory where it is."""
        return self.strategy == "full" and self.fixed_pages is None

    def provide(self, needs: Sequence[int]) -> int:
        """Have pages for sequences of so many tokens; returns the bytes newly allocated.

        Raises:
            GenerationError: memory is short even for the longest of them; what was there is there.
        """
        pool, cache = self.pool, self.cache
        if self.fixed_pages is not None:
            return cache.allocate(self.fixed_pages)
        wanted = wanted_pages(self.strategy, needs, pool.page_size, self.max_sequences, self.longest)
        least = pool.pages_for(max(needs, default=0))
        held = pool.pages if cache.nbytes else 0
        # what memory did not allow before is not tried again: the pool keeps its contents
        if held and wanted <= max(self._wanted, held) and least <= held:
            return 0
        if cache.elastic is None:  # it cannot grow where it is
            self.free()
            held = 0
        affordable = affordable_pages(cache, wanted + 1, self.device, self.group)  # one page is scratch
        pages = wanted if affordable is None else min(wanted, affordable - 1)
        if pages < least:
            raise GenerationError(
                f"the key/value cache gets {max(pages, 0)} pages of {pool.page_size} tokens from the free memory of "
                f"{self.device}, the longest sequence needs {least}; free memory, shorten max_new_tokens or raise tp"
            )
        new = cache.allocate(pages) if pages > held else 0
        if held:
            pool.extend(max(pages, held))
        else:
            pool.reset(pages)
        self._wanted = wanted
        return new

    def free(self) -> int:
        """Give the memory back; the bytes. What the pages held is forgotten."""
        self.pool.reset(self.fixed_pages or 0)
        return self.cache.deallocate()
