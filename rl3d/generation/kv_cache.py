"""The key/value cache of one rank: pools of pages in every layer.

Tensors only; who holds which page is :class:`rl3d.generation.pages.PagePool`'s business.
"""

from collections.abc import Mapping

import torch

from rl3d.generation.transfer import to_device


class KVCache:
    """Key and value pools, each ``[layers, pages + 1, page_size, kv_heads, head_dim]``; page 0 is scratch.

    Args:
        layers, kv_heads, head_dim: this rank's shapes.
        page_size: tokens a page.

    Attributes:
        epoch: changes whenever the pools are at another address, so that whoever keeps addresses (captured graphs)
            knows that they are void.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, page_size: int, pages: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.page_size, self.pages = page_size, pages
        self.dtype, self.device = dtype, device
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.epoch = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values of all layers."""
        return 2 * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return 0 if self.keys is None else 2 * self.keys.nbytes

    def allocate(self) -> int:
        """Allocate the pools if they are not; returns the bytes newly allocated."""
        if self.keys is not None:
            return 0
        shape = (self.layers, self.pages + 1, self.page_size, self.kv_heads, self.head_dim)
        # zeros, because 0 * uninitialised NaN would reach a row through the masked part of its window
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.epoch += 1
        return self.nbytes

    def deallocate(self) -> int:
        """Drop the pools; returns the bytes freed."""
        freed = self.nbytes
        self.keys = self.values = None
        return freed

    def clear(self) -> None:
        """Zero the pools: after values that are not numbers, since a masked 0 * NaN would poison later sequences."""
        if self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [pages + 1, page_size, kv_heads, head_dim]."""
        assert self.keys is not None and self.values is not None
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] at ``rows`` [T], each page * page_size + offset."""
        for pool, new in zip(self.pools(layer), (keys, values), strict=True):
            pool.flatten(0, 1).index_copy_(0, rows, new)

    def read(self, layer: int, pages_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values on the pages of a block table, each [B, kv_heads, P * page_size, head_dim]."""
        batch, columns = pages_BP.shape
        key, value = (
            pool.index_select(0, pages_BP.flatten()).view(batch, columns * self.page_size, *pool.shape[2:]).transpose(1, 2)
            for pool in self.pools(layer)
        )
        return key, value

    def copy_pages(self, sources: Mapping[int, int]) -> None:
        """Copy pages in all layers: ``{target: source}``. Every source is read before any target is written."""
        if not sources:
            return
        assert self.keys is not None and self.values is not None
        target = to_device(list(sources), torch.int64, self.device)
        source = to_device(list(sources.values()), torch.int64, self.device)
        for pool in (self.keys, self.values):
            pool[:, target] = pool[:, source]
