"""Memory that another process of the same host can map: POSIX shared memory on the CPU, CUDA IPC on a GPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import torch


@dataclass(frozen=True)
class Export:
    """What a peer needs to map a storage; can be pickled. ``rebuild(*arguments)`` makes the tensor on a GPU."""

    nbytes: int
    process: int
    descriptor: int = -1
    rebuild: Callable[..., torch.Tensor] | None = None
    arguments: tuple[Any, ...] = ()


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
    return Export(storage.nbytes(), os.getpid(), rebuild=rebuild, arguments=arguments)


def attach(exported: Export) -> torch.Tensor:
    """The bytes of a peer's storage, a flat uint8 tensor over its very memory.

    Raises OSError or RuntimeError when this process may not map it.
    """
    if exported.rebuild is not None:
        return exported.rebuild(*exported.arguments)
    descriptor = os.open(f"/proc/{exported.process}/fd/{exported.descriptor}", os.O_RDWR)
    try:
        make = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
        storage = make(descriptor, exported.nbytes)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)
