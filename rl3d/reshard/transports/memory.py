"""Memory that another process of the same host can map: POSIX shared memory on the CPU, CUDA IPC on a GPU."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from socket import gethostname
from typing import Any

import torch


@dataclass(frozen=True)
class Export:
    """What a peer needs to map a storage; can be pickled. ``rebuild(*arguments)`` makes the tensor on ``gpu``."""

    nbytes: int
    process: int
    descriptor: int = -1
    rebuild: Callable[..., torch.Tensor] | None = None
    arguments: tuple[Any, ...] = ()
    gpu: str = ""


def host_name() -> str:
    """The same for all processes of one running kernel, whatever container they are in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return boot or gethostname()


def export(storage: torch.UntypedStorage) -> Export:
    """Let others map a storage. On the CPU its contents move into shared memory once; views of it stay valid.

    The storage must not be resized as long as a peer maps it. Raises RuntimeError when the memory cannot be shared.
    """
    if storage.device.type == "cpu":
        descriptor, nbytes = storage._share_fd_cpu_()
        return Export(nbytes, os.getpid(), descriptor)
    from torch.multiprocessing.reductions import reduce_tensor

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    rebuild, arguments = reduce_tensor(whole)
    gpu = _uuids()[storage.device.index]
    return Export(storage.nbytes(), os.getpid(), rebuild=rebuild, arguments=arguments, gpu=gpu)


def attach(exported: Export, device: torch.device) -> torch.Tensor:
    """The bytes of a peer's storage, a flat uint8 tensor over its very memory.

    Memory of another GPU is mapped into the context of ``device``, the one that will read it: its kernels could not read
    through a mapping of the other GPU's context, which would also cost half a gigabyte there. The tensor says that it is
    on ``device``.

    Raises OSError or RuntimeError when this process may not map it, or the GPUs cannot read each other.
    """
    if exported.rebuild is not None:
        index = torch.cuda.current_device() if device.index is None else device.index
        return exported.rebuild(*for_process(exported.arguments, exported.gpu, _uuids(), index))
    descriptor = os.open(f"/proc/{exported.process}/fd/{exported.descriptor}", os.O_RDWR)
    try:
        make = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
        storage = make(descriptor, exported.nbytes)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


_SAMPLE = 64 << 20


def read_rate(source: torch.Tensor, device: torch.device) -> float:
    """GB/s (1e9 bytes) of the fastest of a few contiguous copies of up to 64 MiB of mapped memory to ``device``.

    ``source`` is flat uint8; it is only read.
    """
    source = source[:_SAMPLE]
    target, best = torch.empty(len(source), dtype=torch.uint8, device=device), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        best = min(best, time.perf_counter() - start)
    return len(source) / best / 1e9


def gpu_of(device: torch.device) -> str:
    """UUID of a GPU; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return _uuids()[torch.cuda.current_device() if device.index is None else device.index]


def for_process(arguments: tuple[Any, ...], gpu: str, visible: Sequence[str], reader: int) -> tuple[Any, ...]:
    """Arguments of torch's ``rebuild_cuda_tensor`` for a mapping by GPU ``reader`` of this process.

    A process numbers the GPUs that it sees, and ``CUDA_VISIBLE_DEVICES`` or a scheduler may show each rank others: the
    number that the exporting process gave means nothing here.

    Args:
        gpu: UUID of the GPU that has the memory.
        visible: UUIDs of the GPUs that this process sees, by number.
        reader: number of the GPU whose kernels will read the memory.

    Raises:
        OSError: this process does not see that GPU.
    """
    if gpu not in visible:
        raise OSError(f"this process sees {len(visible)} GPU(s), and that memory is on another one")
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    at = list(signature(rebuild_cuda_tensor).parameters).index("storage_device")
    return (*arguments[:at], reader, *arguments[at + 1 :])


def _uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
