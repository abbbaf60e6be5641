"""A cache that keeps its address while its memory comes and goes: what it holds, what captured steps make of it, what
happens without enough memory, and how long it takes; prints JSON.

python -m tests.generation.elastic_checks cpu     steps run eagerly; host memory, limited by the system
python -m tests.generation.elastic_checks cuda    CUDA graphs; device memory, limited by a cap and by a hog
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rl3d.generation.engine import GenerationError, Request, SamplingParams
from rl3d.generation.kv_cache import KVCache
from rl3d.utils import device_memory
from rl3d.utils.peaks import PhasePeaks
from tests.utils.limits import data_limited

MB = 1 << 20


def used(device: torch.device) -> int:
    """Bytes in use: on the GPU, by whatever process; of this process on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cache(device: torch.device, megabytes: int, **options: Any) -> KVCache:
    """Pages of 1 MB in each of two layers, keys and values: 4 MB a page."""
    return KVCache(2, 8, 128, page_size=512, pages=megabytes // 4 - 1, dtype=torch.bfloat16, device=device, **options)


def pools(device: torch.device) -> dict[str, Any]:
    """Address, contents and memory of pools over their life."""
    pool = cache(device, 400)
    assert pool.elastic is not None and pool.nbytes == 0 and pool.epoch == 1
    before, places, steps = used(device), set(), []
    for _ in range(2):
        assert pool.allocate(23) == 96 * MB == pool.nbytes
        first = pool.pools(1)[1]
        places.add((pool.keys.data_ptr(), first.data_ptr(), first.stride()))
        assert not pool.keys[:, :24].any() and not pool.values[:, :24].any(), "what comes is zeros"
        pool.keys[:, :24], pool.values[:, :24] = 1.0, 2.0
        assert pool.allocate(99) == 304 * MB and pool.allocate(50) == 0 and pool.nbytes == 400 * MB
        assert (pool.keys[:, :24] == 1).all() and (pool.values[:, :24] == 2).all(), "what was there stays"
        assert not pool.keys[:, 24:100].any() and not pool.values[:, 24:100].any()
        pool.copy_pages({99: 3})
        assert (pool.pools(1)[1][99] == 2).all()
        pool.values[:, 24:100] = float("nan")
        pool.clear()
        assert not pool.values[:, :100].any()
        pool.keys[:] = 4.0
        steps.append(used(device) - before)
        assert pool.deallocate() == 400 * MB and pool.nbytes == 0 == pool.deallocate()
        steps.append(used(device) - before)
    assert len(places) == 1 and pool.epoch == 1
    small = KVCache(1, 1, 16, page_size=8, pages=9, dtype=torch.float32, device=device)  # half a kilobyte a page
    assert small.allocate(1) == small.nbytes > 0 == small.allocate(3), "mapped already, with the first"
    small.keys[:, :4] = small.values[:, :4] = float("nan")
    small.clear()
    assert small.pages == 3 and not small.keys[:, :4].any() and not small.values[:, :4].any()
    plain = cache(device, 400, elastic=False)
    assert plain.allocate(24) == 100 * MB and plain.epoch == 1 and plain.deallocate() == 100 * MB
    assert plain.allocate(24) == 100 * MB and plain.epoch == 2, "torch's memory is another each time"
    return {"held_and_given_back_mb": [round(step / MB, 1) for step in steps]}


def generator(device: torch.device, **options: Any) -> Any:
    """A tiny model with random weights."""
    from rl3d.distributed import bootstrap
    from rl3d.distributed.groups import GroupRegistry, generation_groups
    from rl3d.generation import CachedSelfAttention, MegatronGenerator
    from rl3d.layout import GenMesh
    from rl3d.models import Architecture
    from rl3d.models.build import build_model
    from tests.reference import TINY

    runtime = bootstrap.current() or bootstrap.init(device=device.type)
    shape = {**TINY, "model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "head_dim": 64}
    arch = Architecture.from_hf({**shape, "max_position_embeddings": 2048})
    groups = generation_groups(GenMesh(1, (0,)).groups(), GroupRegistry(runtime.timeout_s))
    assert groups is not None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(arch, groups, padded_vocab=256, dtype=dtype, device=device, mode="generate",
                        self_attention=CachedSelfAttention)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0)
            parameter.copy_(values)
    options = {"max_sequences": 7, "max_sequence_length": 1024, "fused": True, **options}
    engine = MegatronGenerator(model, None, arch.vocab_size, device=device, dtype=dtype, **options)
    engine.weights_version = 0
    return engine


def requests(count: int, prompt: int, new: int) -> list[Request]:
    g = torch.Generator().manual_seed(prompt)
    return [
        Request(torch.randint(3, 250, (prompt + 3 * (i % 11),), generator=g).tolist(),
                SamplingParams(new + i % 7, temperature=(0.0, 1.0, 0.8)[i % 3]), key=(0, i, 0)) for i in range(count)
    ]  # fmt: skip


def steps(device: torch.device) -> dict[str, Any]:
    """Batches of few and of many pages, with the memory given back in between: captured steps against eager ones on memory
    of torch's, bit for bit."""
    batches = [requests(3, 20, 12), requests(7, 300, 9), requests(5, 3, 12), requests(3, 20, 12)]
    found: dict[str, Any] = {}
    for strategy in ("adaptive", "lightweight"):
        eager = generator(device, cache_strategy=strategy)
        eager.runner.graphs = False
        eager.cache.use_torch()
        engine = generator(device, cache_strategy=strategy)
        assert engine.cache.elastic is not None
        graphs, pages, given = [], [], []
        for turn in range(2):
            for batch in batches:
                eager.allocate_cache()
                right = eager.generate(batch)
                eager.release_cache()
                engine.allocate_cache()
                during: list[int] = []
                assert engine.generate(batch, on_step=lambda _, d=during, e=engine: d.append(e.pool.pages)) == right, (
                    f"{strategy}, turn {turn}: a step on memory that came back is the eager one, bit for bit"
                )
                pages.append(max(during))
                before, held = used(device), engine.cache_bytes
                assert engine.release_cache() == held
                given.append((before - used(device), held))
            graphs.append(engine.runner.captured)
        assert engine.cache.epoch == 1 and graphs[0] == graphs[1], "and nothing is captured again"
        assert len(set(pages)) > 1, "the pools were of different sizes"
        if device.type == "cuda":
            assert graphs[0] > 0 and engine.graph_bytes > 0 and all(freed >= held for freed, held in given), given
        found[strategy] = {"graphs": graphs[0], "graph_mb": round(engine.graph_bytes / MB, 1), "pages": pages}
        engine.drop_cache()
        assert engine.runner.captured == 0 == engine.graph_bytes
    return found


@contextmanager
def limited(device: torch.device, more: int) -> Iterator[None]:
    """Let this process have so many bytes more than now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.memory_reserved(device) + device_memory.mapped_bytes(device)
        usual = torch.cuda.get_per_process_memory_fraction(device)
        # meant for the process, what is mapped already included
        torch.cuda.set_per_process_memory_fraction((held + more) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(usual, device)
        return
    with data_limited(more):
        yield


def refused(device: torch.device) -> dict[str, Any]:
    """Without enough memory: an error that says so, and everything as it was."""
    pool = cache(device, 500)
    pool.allocate(9)
    pool.keys[:, :10], place = 3.0, pool.keys.data_ptr()
    with limited(device, 200 * MB):
        try:
            pool.allocate(124)
            said = ""
        except GenerationError as error:
            said = str(error)
        assert pool.nbytes == 40 * MB and pool.pages == 9 and (pool.keys[:, :10] == 3).all()
        pool.allocate(39)
        assert pool.nbytes == 160 * MB and (pool.keys[:, :10] == 3).all()
    pool.allocate(124)
    assert pool.keys.data_ptr() == place and (pool.keys[:, :10] == 3).all() and not pool.keys[:, 10:125].any()
    pool.deallocate()
    # a generator whose larger batch is too much goes on with smaller ones
    # a tenth of what is free is left to activations; torch takes memory in pieces of 20 MB
    engine = generator(device, page_size=16384 if device.type == "cuda" else 1024, max_sequences=64)
    small, large = requests(1, 20, 3), requests(64, 20, 3)
    before = engine.generate(small)
    with limited(device, 2400 * MB if device.type == "cuda" else engine.cache.bytes_of(9)):
        try:
            engine.generate(large)
            refusal = ""
        except GenerationError as error:
            refusal = str(error)
        assert engine.generate(small) == before
        if device.type == "cuda":  # pages that are affordable within the cap do, one after the other
            assert not refusal and engine.pool.pages < 64
            held = torch.cuda.memory_reserved(device) + device_memory.mapped_bytes(device)
            assert held <= device_memory.cap_bytes(device), (held, device_memory.cap_bytes(device))
    engine.release_cache()
    assert len(engine.generate(large)) == 64 and engine.pool.pages == 64
    return {"pool": said, "generator": refusal}


def beside_torch(device: torch.device) -> dict[str, Any]:
    """On a GPU: what torch keeps unused is given back for the cache, a cap holds for both, and peaks count both."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info(device)[0] - (2 << 30), dtype=torch.uint8, device=device)
    pool = cache(device, 8000)
    try:
        pool.allocate()
        said = ""
    except GenerationError as error:
        said = str(error)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said and pool.nbytes == 0, said
    del hog  # now torch keeps it, and nobody uses it
    torch.cuda.reset_peak_memory_stats(device)
    peaks = PhasePeaks(device)
    with peaks.phase("gen"):
        assert pool.allocate() == 8000 * MB
        torch.empty(1 << 30, dtype=torch.uint8, device=device)
        pool.deallocate()
        torch.empty(2 << 30, dtype=torch.uint8, device=device)
    least, most = 8000 * MB + (1 << 30), 8000 * MB + (1 << 30) + torch.cuda.memory_allocated(device) + MB
    assert least <= peaks.phases["gen"] <= most and peaks.overall == peaks.phases["gen"], peaks.phases
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5, device)
    pool.allocate()
    lowered = torch.cuda.get_per_process_memory_fraction(device)
    assert abs(lowered - (0.5 - 8000 * MB / total)) < 1e-6 and abs(device_memory.cap_bytes(device) - total / 2) < MB
    try:
        torch.empty(int(total * 0.5) - 8000 * MB + MB, dtype=torch.uint8, device=device)
        raise AssertionError("torch was given more than the cap leaves")
    except torch.OutOfMemoryError:
        pass
    pool.deallocate()
    assert abs(torch.cuda.get_per_process_memory_fraction(device) - 0.5) < 1e-6
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    return {"refused": said}


def seconds(device: torch.device, megabytes: list[int]) -> list[dict[str, float]]:
    """To provide and to release, medians of five; 28 layers."""
    rows = []
    for size in megabytes:
        pages = size * MB // (2 * 28 * 32 * 8 * 128 * 2) - 1
        pool = KVCache(28, 8, 128, page_size=32, pages=pages, dtype=torch.bfloat16, device=device)
        took: dict[str, list[float]] = {"provide": [], "release": []}
        for _ in range(5):
            for name, action in (("provide", pool.allocate), ("release", pool.deallocate)):
                start = time.perf_counter()
                action()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took[name].append(time.perf_counter() - start)
        rows.append({"mb": size} | {name: round(sorted(values)[2], 6) for name, values in took.items()})
    return rows


def main(name: str) -> dict[str, Any]:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    found: dict[str, Any] = {"pools": pools(device), "refused": refused(device), "steps": steps(device)}
    if device.type == "cuda":
        found["beside_torch"] = beside_torch(device)
    found["seconds"] = seconds(device, [1000, 20000] if device.type == "cuda" else [64])
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] if len(sys.argv) > 1 else "cpu")))
