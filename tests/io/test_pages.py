"""Large pages for conversions that are called from Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# three processes in turn, each before it has made a tensor: conversions, one after a tensor, one beside a thread
SCRIPT = """
import os, threading, torch
from rl3d.io.convert import hf_to_megatron
def large():
    memory = torch.ones(64 << 20, dtype=torch.uint8)
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages")) >> 10
def convert():
    before = dict(os.environ)
    try:
        hf_to_megatron("nowhere", "nothing")
    except ValueError:
        assert dict(os.environ) == before
        return
    raise AssertionError("nowhere was converted")
def beside():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    convert()
    done.set()
    thread.join()
for steps in ([convert], [lambda: torch.empty(1), convert], [beside]):
    if os.fork() == 0:
        for step in steps:
            step()
        print(large(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not MODE.is_file() or "[madvise]" not in MODE.read_text(), reason="Linux gives large pages anyway, or never"
)
def test_conversions_use_large_pages_where_that_touches_nothing_else():
    env = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
    converting, late, threaded = (int(line) for line in done.stdout.split())
    assert converting >= 32 and late == threaded == 0, done.stderr
