"""The key/value cache: a fixed pool of pages and the table that says which pages a sequence holds.

A decode batch is always the slots ``0 .. B - 1``: when a sequence ends, the last one moves into its slot, which costs
a row of the table. With one page per sequence (``page_size`` at least the longest sequence, the CPU's default) the
table is the identity and keys and values are read as views, without the gather that paging costs; moving then copies.

Pages for prompt and response are reserved when a sequence is admitted, so a running sequence never runs out.
"""

import torch

SCRATCH = 0
"""The page that unused entries of the table name; windows read it behind their mask, no sequence owns it."""


class KVCache:
    """Keys and values of all layers on one rank.

    Args:
        layers, kv_heads, head_dim: this rank's shapes.
        max_sequences: slots, the sequences that can run at once.
        max_sequence_length: most tokens (prompt and response) of a sequence.
        page_size: tokens a page. At least ``max_sequence_length`` means one page per sequence, without gathers.
        pages: size of the pool in pages, scratch not counted; by default every slot can hold the longest sequence.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_sequences: int,
        max_sequence_length: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
    ) -> None:
        self.max_sequences = max_sequences
        self.max_sequence_length = max_sequence_length
        self.contiguous = page_size >= max_sequence_length
        self.page_size = max_sequence_length if self.contiguous else page_size
        self.pages_per_sequence = -(-max_sequence_length // self.page_size)
        self.slots = max_sequences
        if self.contiguous:
            pages = self.slots
        self.pages = max_sequences * self.pages_per_sequence if pages is None else pages
        self.shape = (layers, 2, (self.pages + 1) * self.page_size, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.pool: torch.Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self.free = list(range(self.pages, SCRATCH, -1))
        self.owned: list[list[int]] = [[] for _ in range(self.slots)]
        self.table = torch.full((self.slots, self.pages_per_sequence), SCRATCH, dtype=torch.int64, device=self.device)
        if self.contiguous:
            self.table[:, 0] = torch.arange(1, self.slots + 1, device=self.device)

    # ---- memory

    @property
    def nbytes(self) -> int:
        """Bytes of the pool when it is allocated."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        for n in self.shape:
            size *= n
        return size

    def allocate(self) -> int:
        """Allocate the pool if it is not; returns the bytes newly allocated."""
        if self.pool is not None:
            return 0
        # zeros, because 0 * uninitialised NaN would reach a row through the masked part of its window
        self.pool = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.nbytes

    def deallocate(self) -> int:
        """Drop the pool; returns the bytes freed. Sequences in it are forgotten."""
        freed = 0 if self.pool is None else self.nbytes
        self.pool = None
        self._reset()
        return freed

    def clear(self) -> None:
        """Zero the pool: after values that are not numbers, since a masked 0 * NaN would poison later sequences."""
        if self.pool is not None:
            self.pool.zero_()

    # ---- pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can be reserved now."""
        return self.contiguous or self.pages_for(tokens) <= len(self.free)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give ``slot`` the pages for ``tokens``; call only when :meth:`fits`."""
        if self.contiguous:
            return
        self.owned[slot] = [self.free.pop() for _ in range(self.pages_for(tokens))]
        self.table[slot] = SCRATCH
        self.table[slot, : len(self.owned[slot])] = torch.tensor(self.owned[slot], device=self.device)

    def release(self, slot: int) -> None:
        """Return the pages of ``slot`` to the pool."""
        if self.contiguous:
            return
        self.free += reversed(self.owned[slot])
        self.owned[slot] = []
        self.table[slot] = SCRATCH

    def move(self, source: int, target: int, tokens: int) -> None:
        """Move the sequence in slot ``source``, which holds ``tokens``, to the released slot ``target``."""
        if self.contiguous:
            self.copy(source, target, tokens)
            return
        self.owned[target], self.owned[source] = self.owned[source], []
        self.table[target] = self.table[source]
        self.table[source] = SCRATCH

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of slot ``source`` to slot ``target``, which has its pages."""
        assert self.pool is not None
        if self.contiguous:
            a, b = ((slot + 1) * self.page_size for slot in (source, target))
            self.pool[:, :, b : b + tokens] = self.pool[:, :, a : a + tokens]
        else:
            positions = torch.arange(tokens, device=self.device)
            self.pool[:, :, self.rows(target, positions)] = self.pool[:, :, self.rows(source, positions)]

    # ---- addresses

    def rows(self, slots: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the pool that hold ``positions`` of ``slots``: int64, shaped like ``positions``."""
        page = self.table[slots, positions // self.page_size]
        return page * self.page_size + positions % self.page_size

    def window_rows(self, batch: int, width: int) -> torch.Tensor | None:
        """Rows that hold positions ``0 .. width - 1`` of slots ``0 .. batch - 1``, [batch * width]; None if a view."""
        if self.contiguous:
            return None
        pages = self.table[:batch, : self.pages_for(width)]
        offsets = torch.arange(self.page_size, device=self.device)
        return (pages[:, :, None] * self.page_size + offsets).flatten(1)[:, :width].flatten()

    # ---- one layer

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] at ``rows`` [T]."""
        assert self.pool is not None
        self.pool[layer, 0].index_copy_(0, rows, keys)
        self.pool[layer, 1].index_copy_(0, rows, values)

    def window(self, layer: int, batch: int, width: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots ``0 .. batch - 1``, each [batch, kv_heads, width, head_dim]."""
        assert self.pool is not None
        both = []
        for store in self.pool[layer]:
            if rows is None:
                x = store.view(self.slots + 1, self.page_size, *store.shape[1:])[1 : batch + 1, :width]
            else:
                x = store.index_select(0, rows).view(batch, width, *store.shape[1:])
            both.append(x.transpose(1, 2))
        return both[0], both[1]
