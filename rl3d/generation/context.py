"""What one forward pass of the model needs to know about the cache, in megatron-core's inference protocol.

megatron-core passes the context through the model and asks it a few questions on the way; the attention module
(:mod:`rl3d.generation.attention`) hands it queries, keys and values and gets the attention's output.
"""

import torch
import torch.nn.functional as F
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import BaseInferenceContext

from rl3d.generation.kv_cache import KVCache
from rl3d.kernels import rotary

_WINDOW_STEP = 32  # decode windows grow in such steps, so that a batch's neighbours seldom change a row's reductions


class GenerationContext(BaseInferenceContext):
    """Plan of the current step and the cache it works on.

    Call :meth:`plan_prefill` or :meth:`plan_decode`, then the model with this as ``inference_context``.
    """

    # Read by megatron-core's GPTModel.
    use_flashinfer_fused_rope = False
    num_speculative_tokens = 0

    def __init__(self, cache: KVCache) -> None:
        super().__init__(InferenceConfig(materialize_only_last_token_logits=True))
        self.cache = cache
        self.max_sequence_length = cache.max_sequence_length
        self.positions: torch.Tensor = torch.empty(0, dtype=torch.int64)
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

    def plan_prefill(self, slots: list[int], lengths: list[int], padding: int = 0) -> None:
        """Whole prompts, packed one after the other, then ``padding`` tokens that are thrown away."""
        device = self.cache.device
        self._decode, self._rope, self._lengths, self._padding = False, None, lengths, padding
        self._batch = sum(lengths)
        ranges = [torch.arange(n, device=device) for n in lengths]
        rows = [self.cache.rows(slot, r) for slot, r in zip(slots, ranges, strict=True)]
        self._write_rows = torch.cat(rows)
        self.positions = torch.cat([*ranges, torch.zeros(padding, dtype=torch.int64, device=device)])
        self.last = torch.tensor(lengths, device=device).cumsum(0) - 1

    def plan_decode(self, positions_T: torch.Tensor, batch: int, longest: int) -> None:
        """One token of each of the slots ``0 .. batch - 1``; no position exceeds ``longest - 1``.

        ``positions_T`` may be longer than ``batch``: the rest are tokens that are thrown away.
        """
        self._decode, self._rope, self.positions, self._batch = True, None, positions_T, batch
        self._padding = positions_T.shape[0] - batch
        self._width = min(-(-longest // _WINDOW_STEP) * _WINDOW_STEP, self.max_sequence_length)
        positions_B = positions_T[:batch]
        columns = torch.arange(self._width, device=positions_T.device)
        self._mask = (columns <= positions_B[:, None])[:, None, None]
        self._write_rows = self.cache.rows(torch.arange(batch, device=positions_T.device), positions_B)
        self._window_rows = self.cache.window_rows(batch, self._width)

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
        keys, values = self.cache.window(layer, self._batch, self._width, self._window_rows)
        batch, heads, size = query.shape
        # The query heads that share a key/value head ride in the sequence dimension: nothing is repeated.
        grouped = query.view(batch, key.shape[1], -1, size)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return out.reshape(batch, heads * size)

    def _attend_prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        start = 0
        for length in self._lengths:
            q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in (query, key, value))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            out[start : start + length] = y[0].transpose(0, 1)
            start += length
        return out.flatten(1)
