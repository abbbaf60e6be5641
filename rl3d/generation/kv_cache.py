"""The key/value cache of one rank: pools of pages in every layer.

Tensors only; who holds which page is :class:`rl3d.generation.pages.PagePool`'s business.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from rl3d.generation.elastic import ElasticRows, elastic_rows, refusal
from rl3d.generation.transfer import to_device


class KVCache:
    """Key and value pools, each ``[layers, capacity + 1, page_size, kv_heads, head_dim]``; page 0 is scratch.

    Their addresses are reserved once, and memory is under the first ``pages + 1`` pages of every layer (see
    :mod:`rl3d.generation.elastic`); the others may not be touched. Where that cannot be, the pools are torch's,
    ``[layers, pages + 1, ...]``, at another address whenever they are allocated.

    Args:
        layers, kv_heads, head_dim: this rank's shapes.
        page_size: tokens a page.
        pages: to allocate, where :meth:`allocate` is not told.
        capacity: most pages that there will ever be; ``None``: ``pages``.
        elastic: reserve addresses, where the system has them.

    Attributes:
        elastic: the rows of reserved addresses, or ``None``.
        epoch: changes whenever the pools are at another address, so that whoever keeps addresses (captured graphs)
            knows that they are void.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, page_size: int, pages: int, dtype: torch.dtype,
                 device: torch.device, capacity: int | None = None, elastic: bool = True) -> None:  # fmt: skip
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.page_size, self.pages = page_size, pages
        self.capacity = pages if capacity is None else capacity
        self.dtype, self.device = dtype, device
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.epoch = 0
        self.elastic: ElasticRows | None = None
        if elastic and (rows := elastic_rows(2 * layers, (self.capacity + 1) * self._layer_page, device)) is not None:
            self.elastic, self.epoch = rows, 1
            whole, shape = rows.bytes.view(dtype), (self.capacity + 1, page_size, kv_heads, head_dim)
            pools = whole[:, : (self.capacity + 1) * self._layer_page // dtype.itemsize].unflatten(1, shape)
            self.keys, self.values = pools[:layers], pools[layers:]

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Have the pools' kind of memory on all ranks of a replica that all of them can have. Collective."""
        if group is None:
            return
        stays = torch.tensor([int(self.elastic is not None)], device=self.device)
        dist.all_reduce(stays, dist.ReduceOp.MIN, group=group)
        if not int(stays):
            self.use_torch()

    def use_torch(self) -> None:
        """Give up the addresses: memory is torch's from now on, at another address whenever it is allocated."""
        if self.elastic is not None:
            self.elastic.release()
            self.elastic = self.keys = self.values = None

    @property
    def _layer_page(self) -> int:
        """Bytes of a page in one pool of one layer."""
        return self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of memory now; mapped in pieces, which the last pages may not fill."""
        if self.elastic is not None:
            return self.elastic.nbytes
        return 0 if self.keys is None else 2 * self.keys.nbytes

    def bytes_of(self, pages: int) -> int:
        """Bytes of memory that so many pages take, page 0 included."""
        row = pages * self._layer_page
        return 2 * self.layers * (row if self.elastic is None else self.elastic.rounded(row))

    def pages_in(self, nbytes: int) -> int:
        """Pages, page 0 included, for which so many bytes are enough."""
        row = nbytes // (2 * self.layers)
        if self.elastic is not None:
            row -= row % self.elastic.rounded(1)
        return row // self._layer_page

    def allocate(self, pages: int | None = None) -> int:
        """Have memory for so many pages; returns the bytes newly allocated. What is there already keeps its contents.

        Raises:
            ValueError: more pages than the capacity.
            GenerationError: there is not so much memory; what was there is there.
        """
        pages = self.pages if pages is None else pages
        if pages > self.capacity:
            raise ValueError(f"key/value cache: {pages} pages, expected at most capacity = {self.capacity}")
        held = self.pages if self.nbytes else 0
        try:
            new = self._allocate(pages) if self.elastic is None else self.elastic.hold((pages + 1) * self._layer_page)
        except (MemoryError, torch.OutOfMemoryError) as error:
            wanted = self.bytes_of(pages + 1) - self.nbytes
            raise refusal(wanted, f"{pages} pages of {self.page_size} tokens", self.device, error) from error
        if new or self.elastic is not None:  # a piece that is mapped may have room for more pages
            self.pages = max(held, pages)
        return new

    def _allocate(self, pages: int) -> int:
        """Pools of torch's."""
        if self.keys is not None:
            return 0
        shape = (self.layers, pages + 1, self.page_size, self.kv_heads, self.head_dim)
        # zeros, because 0 * uninitialised NaN would reach a row through the masked part of its window
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        self.keys, self.values = keys, values
        self.epoch += 1
        return self.nbytes

    def deallocate(self) -> int:
        """Give the memory back; returns the bytes freed."""
        if self.elastic is not None:
            return self.elastic.release()
        freed = self.nbytes
        self.keys = self.values = None
        return freed

    def clear(self) -> None:
        """Zero the pools: after values that are not numbers, since a masked 0 * NaN would poison later sequences."""
        if self.nbytes and self.keys is not None and self.values is not None:
            self.keys[:, : self.pages + 1].zero_()
            self.values[:, : self.pages + 1].zero_()

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [pages + 1 or capacity + 1, page_size, kv_heads, head_dim]."""
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
