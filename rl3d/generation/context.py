"""What one forward pass of the model needs to know about the cache, in megatron-core's inference protocol.

megatron-core passes the context through the model and asks it a few questions on the way; the attention module
(:mod:`rl3d.generation.attention`) hands it queries, keys and values and gets the attention's output.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import BaseInferenceContext
from torch.nn.attention.bias import causal_lower_right

from rl3d.generation.kv_cache import KVCache
from rl3d.generation.scheduler import Chunk
from rl3d.generation.transfer import to_device
from rl3d.kernels import paged_decode, rotary
from rl3d.kernels.backend import use_triton
from rl3d.models.layers import has_varlen_attention, varlen_attention

_WINDOW_STEP = 32  # decode windows grow in such steps, so that a batch's neighbours seldom change a row's reductions


class GenerationContext(BaseInferenceContext):
    """Plan of the current step and the cache it works on.

    Call :meth:`plan_prefill` or :meth:`plan_decode`, then the model with this as ``inference_context``.
    """

    # Read by megatron-core's GPTModel.
    use_flashinfer_fused_rope = False
    num_speculative_tokens = 0

    def __init__(self, cache: KVCache, max_sequence_length: int) -> None:
        super().__init__(InferenceConfig(materialize_only_last_token_logits=True))
        self.cache = cache
        self.max_sequence_length = max_sequence_length
        self.positions: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.last = self.chunk_of = self.store_at = self.chunk_pages = self.positions
        self._decode = False
        self._rope_source: torch.Tensor | None = None
        self._rope_table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rope: tuple[torch.Tensor, ...] | None = None

    # ---- megatron-core's questions

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        return self._decode

    def using_cuda_graph_this_step(self) -> bool:
        return False

    # ---- plans

    def plan_prefill(self, chunks: Sequence[Chunk], padding: int = 0) -> None:
        """Chunks of prompts, packed one after the other, then ``padding`` tokens that are thrown away.

        A chunk sees its sequence's earlier tokens on their pages. Sets :attr:`last`, the packed index of the last token
        of each chunk, and for bodies that store keys and values themselves (:meth:`attend_stored`) :attr:`chunk_pages`
        [chunks, pages], :attr:`chunk_of` [T] and :attr:`store_at` [T], positions with -1 for the padding.
        """
        device, size = self.cache.device, self.cache.page_size
        self._decode, self._rope, self._padding = False, None, padding
        self._lengths, self._starts = [len(c.tokens) for c in chunks], [c.start for c in chunks]
        self._batch = sum(self._lengths)
        ends, starts = np.cumsum(self._lengths), np.array(self._starts)
        chunk_of = np.repeat(np.arange(len(chunks)), self._lengths)
        positions = np.arange(self._batch) + (starts - ends + self._lengths)[chunk_of]
        table = np.zeros((len(chunks), max(len(c.sequence.pages) for c in chunks)), dtype=np.int64)
        for row, chunk in zip(table, chunks, strict=True):
            row[: len(chunk.sequence.pages)] = chunk.sequence.pages
        slots = table[chunk_of, positions // size] * size + positions % size
        # in one transfer; a token that pads is of no sequence: its position is 0, for storing keys and values -1
        at = np.zeros((4, self._batch + padding), dtype=np.int64)
        at[:3, : self._batch] = positions, slots, chunk_of
        at[3, : self._batch], at[3, self._batch :] = positions, -1
        rest = np.concatenate([ends - 1, [0], ends, table.ravel()])
        together = to_device(np.concatenate([at.ravel(), rest]), torch.int64, device)
        self.positions, slots_T, self.chunk_of, self.store_at = together[: at.size].view(at.shape).unbind()
        self._write_rows = slots_T[: self._batch]
        self.last, border, pages = together[at.size :].split([len(chunks), len(chunks) + 1, table.size])
        self.chunk_pages = pages.view(table.shape)
        self._pages = [
            None if c.start == 0 else self.chunk_pages[i : i + 1, : -(-(c.start + n) // size)]
            for i, (c, n) in enumerate(zip(chunks, self._lengths, strict=True))
        ]
        self._cumulative = None if any(self._starts) else border.to(torch.int32)

    def plan_decode(self, positions_T: torch.Tensor, table: torch.Tensor, batch: int, longest: int) -> None:
        """One token of each of the first ``batch`` rows of the block table [rows, columns], at ``positions_T``.

        ``positions_T`` may be longer than ``batch``: the rest are tokens that are thrown away. No position exceeds
        ``longest - 1``.
        """
        size = self.cache.page_size
        self._decode, self._rope, self.positions, self._batch = True, None, positions_T, batch
        self._padding = positions_T.shape[0] - batch
        step = max(_WINDOW_STEP, size)
        columns = min(-(-(-(-longest // step) * step) // size), table.shape[1])
        self._table, positions_B = table[:batch, :columns], positions_T[:batch]
        page_B = table[:batch].gather(1, (positions_B // size)[:, None])[:, 0]
        self._write_rows = page_B.long() * size + positions_B % size
        self._lengths_B = (positions_B + 1).int()
        if not use_triton(positions_T):
            window = torch.arange(columns * size, device=positions_T.device)
            self._mask = (window <= positions_B[:, None])[:, None, None]

    # ---- attention

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store keys and values, attend. query [T, heads, D], key and value [T, kv_heads, D] -> [T, heads * D].

        ``layer`` counts from 0 on this rank; query and key are rotated already; ``scale`` ``None`` is 1 / sqrt(D).
        """
        real = self._batch
        self.cache.write(layer, self._write_rows, key[:real], value[:real])
        attend = self._attend_decode if self._decode else self._attend_prefill
        out = attend(layer, query[:real], key, value, scale)
        return F.pad(out, (0, 0, 0, self._padding)) if self._padding else out

    def attend_stored(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      scale: float | None) -> torch.Tensor:  # fmt: skip
        """:meth:`attend` of a prefill whose keys and values are on their pages already."""
        out = self._attend_prefill(layer, query[: self._batch], key, value, scale)
        return F.pad(out, (0, 0, 0, self._padding)) if self._padding else out

    def rotate(self, x: torch.Tensor, angles: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rotary embedding of [T, n, D], the arithmetic of the training path.

        ``angles`` is megatron-core's table [S, 1, 1, D], the D / 2 angles given twice; ``scale`` multiplies cosines and
        sines, which are kept between steps.
        """
        if self._rope_table is None or self._rope_source is not angles:
            # megatron-core keeps it on the GPU when there is one, whatever device the model is on
            once = angles[:, 0, 0, : angles.shape[-1] // 2].to(x.device, torch.float32)
            self._rope_source = angles
            self._rope_table = (once.cos() * scale, once.sin() * scale)
        if self._rope is None:
            self._rope = tuple(table.index_select(0, self.positions) for table in self._rope_table)
        return rotary(x, *self._rope)

    def _attend_decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        batch, heads, size = query.shape
        if use_triton(query):
            scale = size**-0.5 if scale is None else scale
            pools = self.cache.pools(layer)
            return paged_decode(query.contiguous(), *pools, self._table, self._lengths_B, scale).flatten(1)
        keys, values = self.cache.read(layer, self._table)
        # The query heads that share a key/value head ride in the sequence dimension: nothing is repeated.
        grouped = query.view(batch, key.shape[1], -1, size)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return out.reshape(batch, heads * size)

    def _attend_prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        if self._cumulative is not None and has_varlen_attention(query):
            key, value = key[: self._batch], value[: self._batch]
            return varlen_attention(query, key, value, self._cumulative, max(self._lengths), scale).flatten(1)
        out = torch.empty_like(query)
        first = 0
        for start, length, pages in zip(self._starts, self._lengths, self._pages, strict=True):
            q, k, v = (x[first : first + length].transpose(0, 1)[None] for x in (query, key, value))
            if pages is None:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            else:
                k, v = (x[:, :, : start + length] for x in self.cache.read(layer, pages))
                mask = _later_rows(length, start + length, query)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            out[first : first + length] = y[0].transpose(0, 1)
            first += length
        return out.flatten(1)


def _later_rows(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The last ``rows`` rows of a causal mask [columns, columns]."""
    if like.is_cuda:  # a mask that flash attention knows; on a CPU torch would only write it out
        return causal_lower_right(rows, columns)
    return torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril(columns - rows)
