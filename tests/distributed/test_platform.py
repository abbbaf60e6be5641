"""The CPU platform: the shim reaches megatron-core and nothing else, and the libraries' known noise is gone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# One fresh interpreter: what is tested is what importing does.
SCRIPT = """
import os, sys, warnings
from rl3d.distributed import platform
assert "torch" not in sys.modules
assert platform.set_threads(4) == max(1, len(os.sched_getaffinity(0)) // 4)
platform.prepare(); platform.prepare()
import importlib.util
importlib.util.find_spec("megatron.core.pipeline_parallel.schedules")  # looking is not importing: the hook stays
import torch, deepspeed, deepspeed.ops, transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
assert os.environ["DS_ACCELERATOR"] == "cpu" and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
assert deepspeed.ops.__dict__["__compatible_ops__"] == {"deepspeed_shm_comm": False}
assert schedules.torch.zeros([2], dtype=torch.int, device="cuda").device.type == "cpu"
assert schedules.torch.float32 is torch.float32 and schedules.torch is not torch
assert schedules.__loader__ is schedules.__spec__.loader and "Hook" not in type(schedules.__loader__).__name__
assert torch.ones(2).cuda().device.type == "cpu" and torch.cuda.current_device() == torch.device("cpu")
assert not torch.overrides._get_current_function_mode_stack()
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    pass  # only megatron-core's schedules see the proxy
else:
    raise SystemExit("torch itself was patched")
# The tracker forks the CPU's generator: a fork is reproducible and leaves the outer stream as it was.
tracker = get_cuda_rng_tracker()
tracker.add("test-rng", 7)
torch.manual_seed(1)
expected = torch.rand(2)
torch.manual_seed(1)
with tracker.fork("test-rng"):
    inner = torch.rand(2)
assert torch.equal(torch.rand(2), expected)
torch.manual_seed(7)
assert torch.equal(torch.rand(2), inner)
import logging
logging.getLogger("megatron.core.models.gpt.gpt_model").warning("GPTModel IS DEPRECATED. As it says")
print("quiet so far", file=sys.stderr)
warnings.warn("a warning nobody knows")
logging.getLogger("megatron.core.models.gpt.gpt_model").warning("a line nobody knows")
"""


def test_shim_threads_and_silence() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "SLURM_", "DS_"))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    before, _, after = run.stderr.partition("quiet so far\n")
    assert before == "", before
    assert "a warning nobody knows" in after and "a line nobody knows" in after


def test_deepspeed_takes_the_process_group_that_exists() -> None:
    script = (
        "from rl3d.distributed import bootstrap, failures\n"
        "runtime = bootstrap.init(timeout_s=30, device='cpu')\n"
        "with failures.guard(runtime):\n"
        "    from tests.distributed.rank_checks import initialises_deepspeed\n"
        "    print(initialises_deepspeed(runtime), runtime.starter, runtime.device)\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "{'sum': 1.0, 'world': 1} single cpu\n"), run.stderr
    assert run.stderr == ""
