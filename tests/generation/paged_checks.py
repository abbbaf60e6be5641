"""Attention over pages, in chunks and token by token, against plain causal attention; prints the largest error.

python -m tests.generation.paged_checks [cpu|cuda]; with TRITON_INTERPRET=1 decoding takes the kernel on a CPU.
"""

import json
import sys

import torch

from rl3d.generation.context import GenerationContext
from rl3d.generation.engine import Result, SamplingParams
from rl3d.generation.kv_cache import KVCache
from rl3d.generation.scheduler import Chunk, RunningSequence
from rl3d.kernels.backend import use_triton

LAYERS, HEADS, KV_HEADS, SIZE, LONGEST = 2, 4, 2, 16, 40


def sequence(pages: list[int]) -> RunningSequence:
    return RunningSequence([], SamplingParams(1), 0, frozenset(), Result(0), pages=pages)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, H, D] and [T, G, D] -> [T, H * D], float64."""
    q, (k, v) = q.double(), (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q, k) * SIZE**-0.5
    logits.masked_fill_(torch.ones(logits.shape[1:], device=q.device).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", logits.softmax(-1), v).flatten(1)


def largest_error(page_size: int, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(page_size)
    pages = -(-LONGEST // page_size)
    cache = KVCache(LAYERS, KV_HEADS, SIZE, page_size=page_size, pages=3 * pages, dtype=torch.float32, device=device)
    cache.allocate()
    context = GenerationContext(cache, LONGEST)
    order = (torch.randperm(3 * pages, generator=generator) + 1).tolist()  # pages of a sequence lie anywhere
    sequences = [sequence(order[i * pages : (i + 1) * pages]) for i in range(3)]
    table = torch.tensor([s.pages for s in sequences], dtype=torch.int32, device=device)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(LAYERS, 3, LONGEST, heads, SIZE, generator=generator).to(device)

    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    worst = 0.0

    def compare(spans: list[tuple[int, int, int]]) -> None:
        """Attend with the tokens [start, end) of each sequence (index, start, end), under the current plan."""
        nonlocal worst
        for layer in range(LAYERS):
            packed = [torch.cat([x[layer, i, a:b] for i, a, b in spans]) for x in (q, k, v)]
            out = context.attend(layer, *packed, None)
            right = [expected(*(x[layer, i, :b] for x in (q, k, v)))[a:b] for i, a, b in spans]
            worst = max(worst, float((out - torch.cat(right)).abs().max()))

    # whole prompts, then chunks that go on (one beside a prompt that begins), then single tokens
    for spans in ([(0, 0, 13), (1, 0, 1)], [(0, 13, 20), (1, 1, 33), (2, 0, 5)], [(2, 5, 6)]):
        context.plan_prefill([Chunk(sequences[i], a, [0] * (b - a), True) for i, a, b in spans])
        compare(spans)
    lengths = [20, 33, 6]
    while max(lengths) < LONGEST:
        context.plan_decode(torch.tensor(lengths, device=device), table, 3, max(lengths) + 1)
        compare([(i, n, n + 1) for i, n in enumerate(lengths)])
        lengths = [n + 1 for n in lengths]
    # a copied page answers like the original
    spare = next(p for p in range(1, 3 * pages + 1) if p not in sequences[0].pages)
    cache.copy_pages({spare: sequences[0].pages[0]})
    table[0, 0] = spare
    context.plan_decode(torch.tensor(lengths[:1], device=device), table, 1, lengths[0] + 1)
    compare([(0, lengths[0], lengths[0] + 1)])
    return worst


def main(device: str) -> dict[str, object]:
    errors = {size: largest_error(size, torch.device(device)) for size in (3, 16, 64)}
    return {"triton": use_triton(torch.empty(0, device=device)), "errors": errors}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "cpu")))
