"""Less memory than there is."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def data_limited(more: int) -> Iterator[None]:
    """Let the system give this process so many bytes more of writable memory than it has."""
    status = Path("/proc/self/status").read_text().splitlines()
    data = int(next(line.split()[1] for line in status if line.startswith("VmData"))) << 10
    usual = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + more, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, usual)
