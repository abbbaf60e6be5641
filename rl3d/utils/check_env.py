"""``rl3d check-env``: what is installed, what is off, and what that means.

Each library is imported in a process of its own, because "installed" and "works" are two things and because a report
must not drag torch into the session that asks for it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO, TypedDict


class Part(TypedDict):
    """One line of the report. ``detail`` says what was found, or what is off and what to do."""

    ok: bool
    required: bool
    name: str
    version: str
    detail: str


_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": ""}
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if torch.distributed.is_available() and torch.distributed.is_nccl_available():
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["nccl_error"] = str(error)
print("RL3D" + json.dumps(found))
"""
_PREPARED = "from rl3d.distributed import platform; platform.prepare()\n"


def check_env(file: TextIO | None = None) -> dict[str, Part]:
    """Print one [✓] or [✗] line for each part and return what was found, by part.

    Keys: python, torch, cuda, nccl, deepspeed, megatron_core, transformers, vllm, transformer_engine, flash_attn and
    slurm.
    Parts with ``required`` are those without which nothing trains. Never raises for something missing.
    """
    out = sys.stdout if file is None else file
    jobs: dict[str, Callable[[], dict[str, Part]]] = {
        "python": _python,
        "torch": _torch,
        "deepspeed": lambda: _library("deepspeed", "DeepSpeed", "deepspeed", _PREPARED, required=True),
        "megatron_core": lambda: _library(
            "megatron_core", "Megatron-core", "megatron-core", _PREPARED, required=True, module="megatron.core"
        ),
        "transformers": lambda: _library("transformers", "Transformers", "transformers", required=True),
        "vllm": lambda: _library("vllm", "vLLM", "vllm", off="the built-in generation engine is used"),
        "transformer_engine": lambda: _library(
            "transformer_engine",
            "Transformer Engine",
            "transformer-engine",
            off="rl3d's own norms and linear layers are used",
            module="transformer_engine.pytorch",
        ),
        "flash_attn": lambda: _library(
            "flash_attn", "flash-attention", "flash-attn", off="torch's scaled_dot_product_attention is used"
        ),
        "slurm": _slurm,
    }
    with ThreadPoolExecutor(max_workers=4) as pool:
        pending = [pool.submit(job) for job in jobs.values()]
        found: dict[str, Part] = {}
        for result in pending:
            for key, part in result.result().items():
                found[key] = part
                mark = "✓" if part["ok"] else "✗"
                words = " ".join(word for word in (part["name"], part["version"]) if word)
                print(f"[{mark}] {words}" + (f": {part['detail']}" if part["detail"] else ""), file=out, flush=True)
    lacking = [part["name"] for part in found.values() if part["required"] and not part["ok"]]
    if lacking:
        print(f"Required and missing: {', '.join(lacking)}. Install with: pip install rl3d", file=out, flush=True)
    return found


def _part(name: str, ok: bool, found: str = "", detail: str = "", required: bool = False) -> Part:
    return {"ok": ok, "required": required, "name": name, "version": found, "detail": detail}


def _python() -> dict[str, Part]:
    ok = sys.version_info >= (3, 12)
    found = ".".join(map(str, sys.version_info[:3]))
    return {"python": _part("Python", ok, found, "" if ok else "3.12 or newer is needed", required=True)}


def _run(code: str, timeout: float = 180) -> tuple[bool, str]:
    """Run Python code apart; (it worked, its output or the last line of its error)."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        return False, f"the import took more than {timeout:.0f} s"
    if done.returncode == 0:
        return True, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return False, lines[-1].strip() if lines else f"the import ended with exit code {done.returncode}"


def _torch() -> dict[str, Part]:
    if not _installed("torch"):
        missing = "needs PyTorch"
        return {
            "torch": _part("PyTorch", False, "", "not installed; pip install torch", required=True),
            "cuda": _part("CUDA", False, "", missing),
            "nccl": _part("NCCL", False, "", missing),
        }
    ok, output = _run(_TORCH)
    if not ok:
        return {
            "torch": _part("PyTorch", False, _installed("torch"), f"import fails: {output}", required=True),
            "cuda": _part("CUDA", False, "", "needs PyTorch"),
            "nccl": _part("NCCL", False, "", "needs PyTorch"),
        }
    found: dict[str, Any] = json.loads(output.rpartition("RL3D")[2])
    gpus = found["gpus"]
    if gpus:
        kinds = ", ".join(sorted(set(gpus)))
        cuda = _part("CUDA", True, found["cuda"] or "", f"{len(gpus)} device{'s' * (len(gpus) > 1)} ({kinds})")
    elif found["cuda"] is None:
        cuda = _part("CUDA", False, "", "0 devices, this PyTorch is a CPU build; ranks run on the CPU with gloo")
    else:
        cuda = _part("CUDA", False, found["cuda"], "0 devices; ranks run on the CPU with gloo")
    if found["nccl"] and gpus:
        nccl = _part("NCCL", True, found["nccl"])
    elif found["nccl"]:
        nccl = _part("NCCL", False, found["nccl"], "no GPU to use it on; gloo is used")
    else:
        nccl = _part("NCCL", False, "", found.get("nccl_error", "not in this PyTorch; gloo is used"))
    return {"torch": _part("PyTorch", True, found["version"], required=True), "cuda": cuda, "nccl": nccl}


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _library(
    key: str,
    name: str,
    distribution: str,
    before: str = "",
    *,
    required: bool = False,
    off: str = "",
    module: str | None = None,
) -> dict[str, Part]:
    found = _installed(distribution)
    if not found:
        detail = f"not installed; pip install {distribution}" if required else f"not installed; {off}"
        return {key: _part(name, False, "", detail, required)}
    ok, output = _run(f"{before}import {module or key}")
    detail = "" if ok else f"import fails: {output}" + (f"; {off}" if off else "")
    return {key: _part(name, ok, found, detail, required)}


def _slurm() -> dict[str, Part]:
    srun = shutil.which("srun")
    if srun is None:
        return {"slurm": _part("SLURM", False, "", "srun is not on PATH; start with torchrun, deepspeed or rl3d train")}
    try:
        done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=20)
        found = done.stdout.strip().removeprefix("slurm ").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return {"slurm": _part("SLURM", False, "", f"srun does not answer: {error}")}
    job = os.environ.get("SLURM_JOB_ID")
    return {"slurm": _part("SLURM", done.returncode == 0, found, f"inside job {job}" if job else "")}
