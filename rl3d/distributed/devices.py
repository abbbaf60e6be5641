"""How much memory a rank may use: of its GPU, or of the host it shares with others. Without torch where torch is not
there yet: the launcher asks before any rank starts."""

import re
import shutil
import subprocess
from pathlib import Path


def host_memory() -> int | None:
    """Bytes of host memory available now, the control group's limit considered; None when the system does not say."""
    available = _meminfo("MemAvailable")
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None and limit < 1 << 60:
            # pages that hold files can be given up
            room = max(limit - used, 0) + (_inactive_file() or 0)
            available = room if available is None else min(available, room)
    return available


def _meminfo(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file() -> int | None:
    try:
        stat = Path("/sys/fs/cgroup/memory.stat").read_text()
    except OSError:
        return None
    found = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return None if found is None else int(found[1])


def gpu_memory() -> int | None:
    """Bytes free on the GPU of this machine that has least, as the driver says; None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()] if done.returncode == 0 else []
    return min(sizes) << 20 if sizes else None
