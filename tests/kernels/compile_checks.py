"""Every kernel compiled for a GPU on a machine without one, launched as the library launches it; prints JSON.

python -m tests.kernels.compile_checks [CAPABILITY]     90 (Hopper) when left out

Tensors are small and on the CPU and nothing runs, so results are whatever memory held; signatures, constants and
launch options are the library's own. What the interpreter lets pass and the compiler does not shows here.
"""

import importlib
import json
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import rl3d.kernels
from rl3d.generation.noise import sequence_key
from rl3d.generation.sampler import Sampler, SamplingBatch
from rl3d.kernels import paged_attention, strided_copy
from tests.generation.shards import FakeGroup

# called by kernels
HELPERS = {"begin", "_joined", "_save", "_log_sum_exp", "_exponential", "_perturbed", "_among", "_kept_above", "_everywhere"}
COMPILED: set[str] = set()
CPU = torch.device("cpu")


class Driver:
    """What Triton asks of a GPU's driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448})

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


def only_compile(capability: int) -> None:
    """From here on a launch compiles for such a GPU and does no more, and every tensor takes the kernels' path."""
    triton.runtime.driver.set_active(Driver(capability))
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"], self.fn.__name__
        COMPILED.add(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("rl3d.") and hasattr(module, "use_triton"):
            module.use_triton = lambda x: True  # type: ignore[attr-defined]
        if name.startswith("rl3d.kernels.") and hasattr(module, "overlap"):
            options = {"OVERLAP": capability >= 90, "launch_pdl": capability >= 90}
            module.overlap = lambda device, options=options: options  # type: ignore[attr-defined]


def decoding(dtype: torch.dtype) -> None:
    for heads, kv_heads, size, columns in ((12, 2, 128, 40), (4, 4, 64, 2)):
        pools = torch.zeros(2, 9, 32, kv_heads, size, dtype=dtype)
        table, positions = torch.zeros(3, columns, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        q = torch.zeros(3, heads, size, dtype=dtype)
        rl3d.kernels.paged_decode(q, *pools, table, positions.to(torch.int32), 0.1)
        qkv, angles = torch.zeros(3, (heads + 2 * kv_heads) * size, dtype=dtype), torch.zeros(64, size // 2)
        norm = torch.zeros(size, dtype=dtype)
        for bias, norms in ((None, None), (qkv[0], (norm, norm, 1e-6))):
            rl3d.kernels.rotate_append(qkv, bias, norms, angles, angles, positions, table, *pools)
        kept = torch.zeros(2, 3, kv_heads, size, dtype=dtype)
        rl3d.kernels.rotate_append(qkv, None, None, angles, angles, positions, table, *pools, positions, tuple(kept))
    x, weight = torch.zeros(1, 256, dtype=dtype), torch.zeros(512, 256, dtype=dtype)
    for glu in (False, True):
        rl3d.kernels.norm_gemv(x, (x[0], 1e-6), weight, glu=glu)
    rl3d.kernels.norm_gemv(x, (x[0], 1e-6), weight, dtype=torch.float32)
    rl3d.kernels.gemv_add(x, weight, torch.zeros(1, 512, dtype=dtype))
    rl3d.kernels.add_rms_norm(x, x, x[0], 1e-6)


def training(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(5, 256, dtype=dtype, requires_grad=True), torch.zeros(256, dtype=dtype, requires_grad=True)
    torch.autograd.grad(rl3d.kernels.rms_norm(x, weight, 1e-6), (x, weight), torch.zeros(5, 256, dtype=dtype))
    torch.autograd.grad(rl3d.kernels.swiglu(x), x, torch.zeros(5, 128, dtype=dtype))
    heads, angles = torch.zeros(5, 4, 64, dtype=dtype, requires_grad=True), torch.zeros(5, 32)
    torch.autograd.grad(rl3d.kernels.rotary(heads, angles, angles), heads, torch.zeros(5, 4, 64, dtype=dtype))
    logits, labels, row = torch.zeros(5, 1000), torch.zeros(5, dtype=torch.int64), torch.zeros(5)
    rl3d.kernels.logprob_statistics(logits, labels, 900, 1.0)
    rl3d.kernels.logprob_gradient(logits, labels, row, row, row, row, 900, 1.0, dtype)


def drawing(dtype: torch.dtype) -> None:
    logits, positions = torch.zeros(4, 9008, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    keys = [sequence_key(0, 0, 0, i) for i in range(4)]
    for temperature, top_p, top_k, min_p in ((0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0), (0.7, 1.0, 0, 0.0), (1.0, 0.9, 0, 0.0),
                                             (0.7, 1.0, 20, 0.0), (1.0, 0.9, 20, 0.1)):  # fmt: skip
        batch = SamplingBatch.build(keys, [temperature] * 4, [top_p] * 4, [top_k] * 4, CPU, [min_p] * 4)
        Sampler(9001, 9008, None, CPU).draw(logits, batch, positions)
        if batch.filtered:
            shared = Sampler(9001, 2 * 9008, FakeGroup(2, 0), CPU)  # type: ignore[arg-type]
            shared._gather = lambda x: torch.cat([x, x], 1)  # type: ignore[method-assign]
            shared.draw(logits, batch, positions)


def copying() -> None:
    memory = torch.zeros(2, 1 << 16, dtype=torch.uint8)
    strided_copy._reachable = lambda sources, device: True
    for shift, columns in ((0, 4096), (0, 72), (2, 66), (1, 33)):
        views = [m.as_strided((3, columns), (9000, 1), shift) for m in memory]
        strided_copy.CopyTable([(views[0], views[1])], CPU).run()


def main(capability: int) -> dict[str, Any]:
    for found in pkgutil.iter_modules(rl3d.kernels.__path__):
        importlib.import_module(f"rl3d.kernels.{found.name}")
    kernels = {
        f"{name.rpartition('.')[2]}.{value.fn.__name__}"
        for name, module in list(sys.modules.items())
        if name.startswith("rl3d.kernels.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
        and value.fn.__module__ == name
        and value.fn.__name__ not in HELPERS
        and name != "rl3d.kernels.bracket"  # called by kernels, all of it
    }
    only_compile(capability)
    paged_attention._stages = lambda device, nbytes: 2  # by the GPU's shared memory
    for dtype in (torch.bfloat16, torch.float32):
        decoding(dtype)
        training(dtype)
    drawing(torch.float32)
    copying()
    return {"kernels": sorted(kernels), "missing": sorted(kernels - COMPILED)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)))
