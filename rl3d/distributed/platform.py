"""What must be true of a process before megatron-core and DeepSpeed are imported: environment, CPU shim, quiet logs.

megatron-core says ``device="cuda"`` and ``torch.cuda.current_device()`` in a few places even where no kernel needs a
GPU. On a machine without CUDA :func:`prepare` redirects exactly those places to the CPU, so that the same modules and
schedules run over gloo. With CUDA present nothing is patched.
"""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rl3d.distributed.page_locked import take_exact_sizes

# (logger, beginning of the message): lines of the libraries that tell a user nothing to act upon.
_KNOWN_LINES = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("torch.distributed.elastic.multiprocessing.redirects", "NOTE: Redirects are currently not supported"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
)
# (beginning of the message, category): the same for `warnings`; message is a regular expression matched at the start.
_KNOWN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"Can't initialize NVML", UserWarning),
    (r"The pynvml package is deprecated", FutureWarning),
    (r"CUDA initialization: ", UserWarning),  # a CPU machine with a CUDA build of torch
    (r"User provided device_type of 'cuda', but CUDA is not available", UserWarning),
    (r"No device id is provided via `init_process_group` or `barrier", UserWarning),
    (r"barrier\(\): using the device under current context", UserWarning),
    (r"`torch\.cuda\.amp\.custom_(fwd|bwd)", FutureWarning),
    (r"Attempting to run cuBLAS, but there was no current CUDA context", UserWarning),  # autograd's own thread
    (r".*invalid escape sequence", SyntaxWarning),  # in megatron-core's docstrings, when first compiled
    (r'"is" with .* literal', SyntaxWarning),  # in a package that reasoning-gym imports, likewise
    (r"torch\.distributed\._all_gather_base is a private function", FutureWarning),
    (r"torch\.distributed\._reduce_scatter_base is a private function", FutureWarning),
    (r"`torch\.distributed\.\w+` is deprecated. Please use", FutureWarning),  # in both libraries
)


class _DropLine(logging.Filter):
    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().lstrip().startswith(self.start)


_prepared = False


def prepare() -> None:
    """Make this process ready for megatron-core and DeepSpeed. Idempotent; call it before importing either.

    Sets environment variables only where the user has not set them, installs the CPU shim when there is no CUDA
    device, keeps DeepSpeed from compiling kernels during start-up and drops the known noise of the libraries (unknown
    warnings still show). Imports torch, nothing heavier: megatron-core and DeepSpeed are adjusted when they load.
    """
    global _prepared
    if _prepared:
        return
    _prepared = True
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # mcore overlaps SP/TP communication only with 1
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would print a warning each
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    silence_known_noise()

    import torch

    take_exact_sizes()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _patch_torch(torch)
        _when_imported("megatron.core.pipeline_parallel.schedules", _patch_schedules)
        _when_imported("megatron.core.tensor_parallel.random", _patch_random)
    _when_imported("deepspeed.ops", _no_kernel_builds)
    _when_imported("deepspeed.utils.logging", _quiet_deepspeed)
    _when_imported("deepspeed.runtime.bf16_optimizer", _no_memory_prints)


def set_threads(ranks_on_node: int = 1) -> int:
    """Give each rank its share of the cores unless the user has set OMP_NUM_THREADS; returns the threads per rank."""
    # srun may bind each rank to its own cores already; then they are not to be shared out again.
    given = os.environ.get("OMP_NUM_THREADS") or os.environ.get("SLURM_CPUS_PER_TASK") or ""
    if given.isdigit() and int(given) > 0:
        threads = int(given)
        os.environ.setdefault("OMP_NUM_THREADS", given)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        threads = max(1, cores // max(1, ranks_on_node))
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    return threads


def silence_known_noise() -> None:
    """Drop the libraries' known warnings and log lines; everything else still shows."""
    for message, category in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, start in _KNOWN_LINES:
        logging.getLogger(name).addFilter(_DropLine(start))


# ---- the CPU shim


def _patch_torch(torch: Any) -> None:
    """The calls into torch.cuda that megatron-core makes on every path, answered for the CPU."""
    cpu = torch.device("cpu")

    def get_rng_state(device: Any = "cpu") -> Any:
        return torch.get_rng_state()

    def set_rng_state(new_state: Any, device: Any = "cpu") -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_rng_state
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


class _CpuTorch(ModuleType):
    """`torch` as megatron-core's schedules see it: ``zeros(device="cuda")`` means the CPU, all else is torch.

    A global TorchFunctionMode would do as well, but costs 1.4-1.5x on small forward passes.
    """

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("torch")
        self.__dict__["_torch"] = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_torch"], name)

    def zeros(self, *size: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return self.__dict__["_torch"].zeros(*size, **kwargs)


def _patch_schedules(module: ModuleType) -> None:
    if not isinstance(module.torch, _CpuTorch):
        module.torch = _CpuTorch(module.torch)  # type: ignore[attr-defined]


def _patch_random(module: ModuleType) -> None:
    import torch

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)  # the original queues the call until CUDA is initialised, that is for ever

    # The two generators are one here, so this is always so.
    logging.getLogger(module.__name__).addFilter(_DropLine("CPU RNG state changed within GPU RNG context"))
    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


# ---- DeepSpeed


def _no_kernel_builds(module: ModuleType) -> None:
    """`deepspeed.init_distributed` would compile a shared-memory operator (85 s, and it fails without ninja).

    The table of compatible operators is made on first use by running compilers; its only reader looks up this one.
    """
    module.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def _quiet_deepspeed(module: ModuleType) -> None:
    """Notices off, warnings and errors on; on stderr, so that stdout holds the program's own lines."""
    logger = logging.getLogger("DeepSpeed")
    if logger.level < logging.WARNING:
        logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def _no_memory_prints(module: ModuleType) -> None:
    """BF16_Optimizer prints memory figures while it is built, whatever the log level, and resets the peak counters."""
    module.see_memory_usage = lambda *args, **kwargs: None  # type: ignore[attr-defined]


# ---- run a function on a module right after it is imported

_hooks: dict[str, Callable[[ModuleType], None]] = {}


class _HookLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, hook: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if its own loader had loaded it (pickling, inspect, importlib.resources).
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.hook(module)


class _HookFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has the other finders look, and wraps the loader of a module that has a hook."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = _hooks.get(fullname)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookLoader(spec.loader, hook)
                return spec
        return None


def _when_imported(name: str, hook: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _hooks[name] = hook
    if not any(isinstance(finder, _HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HookFinder())
