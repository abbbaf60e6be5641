"""Samplers of a vocabulary that is cut in pieces, without processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rl3d.generation.sampler import Draw, Sampler, SamplingBatch


class Shards:
    """A sampler for each shard of a vocabulary, in threads that exchange what they would gather.

    Only one of them runs at a time, since Triton's interpreter bears no two.

    Attributes:
        widest: numbers of a row that any rank got at once.
    """

    def __init__(self, count: int, fused: bool = True) -> None:
        self.count, self.fused, self.widest = count, fused, 0
        self._barrier, self._turn = threading.Barrier(count), threading.Lock()
        self._parts: list[Any] = [None] * count

    def draw(self, logits: torch.Tensor, vocab: int, batch: SamplingBatch,
             positions: torch.Tensor | None = None) -> list[Draw]:  # fmt: skip
        """What each rank draws. ``logits`` [B, columns of all shards]."""
        positions = torch.zeros(len(logits), dtype=torch.int64, device=logits.device) if positions is None else positions

        def one(rank: int) -> Draw:
            sampler = Sampler(vocab, logits.shape[1], FakeGroup(self.count, rank), logits.device)  # type: ignore[arg-type]
            sampler.fused = self.fused
            rows = logits.shape[1] // self.count
            sampler._gather = lambda x: self._gather(rank, x)  # type: ignore[method-assign]
            with self._turn:
                return sampler.draw(logits[:, rank * rows : (rank + 1) * rows], batch, positions)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))

    def _gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = x
        self._turn.release()
        self._barrier.wait(120)
        out = torch.cat(self._parts, 1)
        self.widest = max(self.widest, out[0].numel() if out.dim() == 2 else 0)
        self._barrier.wait(120)
        self._turn.acquire()
        return out


class FakeGroup:
    """What a sampler asks a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)
