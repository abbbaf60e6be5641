"""The fused draw against torch's operations, and on a GPU captured steps against eager ones; prints JSON.

python -m tests.generation.fused_checks cpu     in Triton's interpreter, with TRITON_INTERPRET=1
python -m tests.generation.fused_checks cuda    compiled, and a tiny model end to end
"""

import json
import sys
import time
from typing import Any

import torch

from rl3d.generation.filters import MARGIN
from rl3d.generation.noise import sequence_key
from rl3d.generation.sampler import Sampler, SamplingBatch, _combine, _joined
from rl3d.kernels import sift
from rl3d.kernels.threshold import Filters, Shard, filter_edges
from tests.generation.shards import Shards

VOCAB = 9001  # three blocks, the last one nearly empty


def sampler(device: torch.device) -> dict[str, Any]:
    """Draws of both paths on the same logits; the vocabulary whole, and cut in two with padding behind."""
    g = torch.Generator().manual_seed(3)
    rows = 12
    logits = (torch.randn(rows, VOCAB, generator=g) * 2).to(device)
    logits[3, 7] = logits[3, 8500] = 60.0  # a tie that greedy decides for the lower id
    logits[5, VOCAB - 1] = 40.0
    keys = [sequence_key(0, 1, i, 0) for i in range(rows)]
    positions = torch.arange(rows, device=device) + 5
    differ, worst, draws = 0, 0.0, 0
    for temperature in ([1.0] * rows, [0.0] * rows, [0.0, 0.7, 1.0, 0.0, 1.7, 0.0] * 2):
        batch = SamplingBatch.build(keys, temperature, [1.0] * rows, [0] * rows, device)
        for padded in (VOCAB, 24577):  # with the second, half of the vocabulary is more than there is
            whole = Sampler(VOCAB, padded, None, device)
            wide = torch.nn.functional.pad(logits, (0, padded - VOCAB), value=99.0)
            fused = whole.draw(wide, batch, positions)
            whole.fused = False
            plain = whole.draw(wide, batch, positions)
            cut = _two_shards(wide, batch, positions, device)
            for found in (fused, _combine(cut, batch), _joined(cut, batch)):
                differ += int((found.tokens != plain.tokens).sum() + (found.close != plain.close).sum())
                for name in ("logprobs", "sampled", "plain"):
                    worst = max(worst, float((getattr(found, name) - getattr(plain, name)).abs().max()))
                draws += rows
            if temperature[3] == 0:
                assert int(fused.tokens[3]) == 7 and bool(fused.close[3])
    logits[2, 17] = float("nan")
    broken = Sampler(VOCAB, VOCAB, None, device).draw(logits, batch, positions)
    assert broken.logprobs[2].isnan() and int(broken.tokens[2]) < VOCAB, "a row that is no number says so"
    return {"draws": draws, "different": differ, "logprob": worst}


def filters(device: torch.device) -> dict[str, Any]:
    """Filtered draws of both paths, whole and in three shards of which the last is padding; and the edges that the kernels
    find against a sort in fp64, at the size of a real vocabulary on a GPU."""
    g = torch.Generator().manual_seed(9)
    cases = [(0.7, 1.0, 30, 0.0), (1.0, 0.99, 0, 0.0), (1.5, 0.9, 100, 0.0), (1.0, 0.3, 0, 0.02), (0.0, 0.5, 3, 0.0),
             (1.0, 1.0, 0, 0.0), (1.0, 1e-6, 0, 0.0), (1.2, 0.97, 256, 0.0), (1.0, 1.0, 1, 0.0), (2.0, 0.99, 0, 0.01),
             (1.0, 0.999999, 0, 0.0), (0.5, 1.0, 0, 0.2)]  # fmt: skip
    vocab, rows = 257, 2 * len(cases)
    logits = torch.randn(rows, vocab, generator=g) * 2
    logits[7:9] = logits[7:9].round()  # many ties
    logits[9, 5:] = float("-inf")
    logits[13], logits[2] = 0.0, logits[2] * 1e-4 + 3.0  # flat
    logits[15, 200] = 30.0
    columns = [list(c) for c in zip(*(cases * 2), strict=True)]
    positions = torch.arange(rows, device=device)
    keys = [sequence_key(0, 0, 0, i) for i in range(rows)]
    differ, worst, draws = 0, 0.0, 0
    for index in (list(range(rows)), [1, 3, 5, 6, 9, 10], [0, 8, 12, 20], [5, 11, 17, 23]):
        batch = SamplingBatch.build([keys[i] for i in index], *([c[i] for i in index] for c in columns[:3]), device,
                                    [columns[3][i] for i in index])  # fmt: skip
        wide = torch.nn.functional.pad(logits[index], (0, 400 * 3 - vocab), value=50.0).to(device)
        whole = Sampler(vocab, wide.shape[1], None, device)
        fused = whole.draw(wide, batch, positions[: len(index)])
        whole.fused = False
        plain = whole.draw(wide, batch, positions[: len(index)])
        for found in (fused, *Shards(3).draw(wide, vocab, batch, positions[: len(index)])):
            differ += int((found.tokens != plain.tokens).sum() + (found.close != plain.close).sum())
            for name in ("logprobs", "sampled", "plain"):
                worst = max(worst, float((getattr(found, name) - getattr(plain, name)).abs().max()))
            draws += len(index)
    return {"draws": draws, "different": differ, "logprob": worst, **_edges(device, g)}


class Counted:
    """A kernel that counts the rows which are left for it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.rows = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.rows += int((args[6] > 0).sum())
            self.kernel[grid](*args, **options)

        return launch


def _edges(device: torch.device, g: torch.Generator) -> dict[str, Any]:
    """Largest probability that an edge of the kernels keeps and a sort in fp64 does not, or the other way round: found in
    what a sample lets expect, in all the logits of a row, and by ranks together. And how many rows the first left for the
    second, with room and without."""
    vocab = 151_936 if device.type == "cuda" else 20_011  # of two parts at least, and not all of it in a sample
    logits = torch.stack([torch.randn(vocab, generator=g) * scale for scale in (2.0, 0.3, 4.0, 3.0, 1.0)])
    logits[3] += 8 * (torch.rand(vocab, generator=g) < 1e-3)  # few have most of it
    logits[4] = (logits[4] * 4).round() / 4  # thousands alike
    logits, ones = logits.to(device), torch.ones(len(logits), device=device)
    seek, room = sift._seek, sift.ROOM
    guessed, all_of_it = Counted(seek), Counted(seek)
    worst = 0.0
    for temperature, top_p, top_k in ((1.0, 0.95, 0), (0.7, 0.9, 900), (1.0, 1.0, 50)):
        filters = Filters((ones * top_k).long(), ones * top_p, ones * 0, MARGIN, top_k > 0, top_p < 1)
        ways: list[tuple[Any, int, Any]] = [(guessed, room, None)]
        if top_k > 0 and top_p < 1:
            ways += [(all_of_it, 16, None), (seek, room, torch.clone)]
        for sift._seek, sift.ROOM, gather in ways:
            found = filter_edges(Shard(logits, vocab, vocab, ones * temperature, gather), filters)
            for row, edge in zip((logits / temperature), found[:, 1], strict=True):
                ranked = row.double().sort(descending=True).values
                share = torch.softmax(ranked, 0)
                if top_k:
                    share[top_k:] = 0
                before = share.cumsum(0) / share.sum() - share / share.sum()
                kept = int(((before < top_p) & (share > 0)).sum())
                right, ours = ranked[kept - 1], edge.double()
                between = (ranked >= torch.minimum(right, ours)) & (ranked < torch.maximum(right, ours))
                worst = max(worst, float((torch.softmax(ranked, 0) * between).sum()))
        sift._seek, sift.ROOM = seek, room
    return {"edges": worst, "left": [guessed.rows, all_of_it.rows]}


def _two_shards(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What two ranks would gather, put together by hand."""
    half = -(-logits.shape[1] // 2)
    parts = []
    for start in (0, half):
        shard = Sampler(max(0, min(VOCAB - start, half)), half, None, device)
        shard.start = start
        shard.shard_keys_V = Sampler(VOCAB, VOCAB, None, device).shard_keys_V[start : start + half]
        local = torch.nn.functional.pad(logits, (0, 1))[:, start : start + half].contiguous()
        parts.append(shard._fused_partials(local, batch, positions))
    assert parts[0].shape == parts[1].shape, "ranks gather parts of one shape"
    return torch.cat(parts, 1)


def steps(device: torch.device) -> dict[str, Any]:
    """A tiny model with random weights: tokens of captured, eager and unfused decoding in bf16; graphs that stay."""
    from rl3d.distributed import bootstrap
    from rl3d.distributed.groups import GroupRegistry, generation_groups
    from rl3d.generation import CachedSelfAttention, MegatronGenerator, Request, SamplingParams
    from rl3d.layout import GenMesh
    from rl3d.models import Architecture
    from rl3d.models.build import build_model
    from tests.reference import TINY

    runtime = bootstrap.init(device=device.type)
    shape = {**TINY, "model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "head_dim": 64}
    arch = Architecture.from_hf({**shape, "max_position_embeddings": 2048})
    groups = generation_groups(GenMesh(1, (0,)).groups(), GroupRegistry(runtime.timeout_s))
    assert groups is not None
    model = build_model(arch, groups, padded_vocab=256, dtype=torch.bfloat16, device=device, mode="generate",
                        self_attention=CachedSelfAttention)  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    g = torch.Generator().manual_seed(1)
    requests = [
        Request(torch.randint(3, 250, (3 + 29 * i,), generator=g).tolist(),
                SamplingParams(40 + i, temperature=(0.0, 1.0, 0.8)[i % 3], top_p=0.9 if i == 5 else 1.0,
                               top_k=20 if i == 8 else 0), key=(0, i, 0))
        for i in range(11)
    ]  # fmt: skip
    answers: dict[str, Any] = {}
    engines = {}
    for name, options in {"graphs": {}, "eager": {}, "modules": {"fused": False}}.items():
        engine = MegatronGenerator(model, None, arch.vocab_size, max_sequences=7, max_sequence_length=1024, device=device,
                                   dtype=torch.bfloat16, **options)  # fmt: skip
        engine.weights_version = 0
        if name == "eager":
            assert engine.runner is not None
            engine.runner.graphs = False
        engines[name] = engine
        answers[name] = engine.generate(requests)
    assert answers["graphs"] == answers["eager"], "a captured step is the eager one, bit for bit"
    runner = engines["graphs"].runner
    captured = runner.captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    for engine in engines.values():
        engine.weights_version = 1
    again = engines["graphs"].generate(requests)
    assert again == engines["eager"].generate(requests), "weights replaced in place are seen"
    assert again != answers["graphs"] and runner.captured == captured, "and nothing is captured again"
    engine = engines["graphs"]
    engine.release_cache()
    assert engine.generate(requests) == again and engine.cache.epoch == 1, "memory that comes back is where it was"
    assert runner.captured == captured, "and graphs read it there"
    engine.cache.use_torch()
    old = list(runner._captured.values())
    assert engine.generate(requests) == again and engine.cache.epoch == 2, "pools at another address void the graphs"
    assert runner.captured == captured and not any(g is o for g in runner._captured.values() for o in old)
    pairs = [(a, b) for x, y in zip(answers["graphs"], answers["modules"], strict=True)
             for a, b in zip(x.token_ids, y.token_ids, strict=True)]  # fmt: skip
    return {"graphs": captured, "tokens": len(pairs), "other_kernels_agree": sum(a == b for a, b in pairs) / len(pairs),
            "started_s": _started(runner)}  # fmt: skip


def _started(runner: Any) -> float:
    """Seconds that starting a step takes while the device has other work for a fifth of a second or more."""
    assert runner.rows < runner.table.shape[0], "a bucket narrower than the buffers"
    longest = runner.table.shape[1] * runner.cache.page_size
    runner.step(longest).to_host()  # captured now
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    begun = time.perf_counter()
    draw = runner.step(longest)
    took = time.perf_counter() - begun
    draw.to_host()
    assert took < 0.1 < time.perf_counter() - begun, "the host does not wait for the step, nor for what is before it"
    return took


if __name__ == "__main__":
    chosen = torch.device(sys.argv[1])
    report = {"sampler": sampler(chosen), "filters": filters(chosen)}
    if chosen.type == "cuda":
        report["steps"] = steps(chosen)
    print(json.dumps(report))
