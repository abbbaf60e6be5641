"""``rl3d check-env``: what is installed, what is off, and what that means.

Libraries are imported in other processes, because "installed" and "works" are two things and because a report must not
drag torch into the session that asks for it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO, TypedDict


class Part(TypedDict):
    """One line of the report. ``detail`` says what was found, or what is off and what to do."""

    ok: bool
    required: bool
    name: str
    version: str
    detail: str


_REQUIRED = (
    ("deepspeed", "DeepSpeed", "deepspeed"),
    ("megatron_core", "Megatron-core", "megatron-core"),
    ("transformers", "Transformers", "transformers"),
)
_OPTIONAL = (
    ("vllm", "vLLM", "vllm", "vllm", "the built-in generation engine is used"),
    (
        *("transformer_engine", "Transformer Engine", "transformer-engine", "transformer_engine.pytorch"),
        "rl3d's own norms and linear layers are used",
    ),
    (
        *("flash_attn", "flash-attention", "flash-attn", "flash_attn"),
        "torch's scaled_dot_product_attention is used",
    ),
)
# Prints one line for each part as soon as it is known, so that a crash in one of them hides only those after it.
_PROBE = """
import contextlib, importlib, io, json, sys
def say(key, found):
    print("RL3D" + json.dumps({key: found}), file=sys.__stdout__, flush=True)
def attempt(key, what):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = what()
        say(key, {"ok": True, **(found or {})})
    except BaseException as error:
        say(key, {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
def torch_facts():
    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": ""}
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
attempt("torch", torch_facts)
attempt("transformers", lambda: importlib.import_module("transformers") and None)
def prepared(module):
    from rl3d.distributed import platform
    platform.prepare()
    importlib.import_module(module)
attempt("megatron_core", lambda: prepared("megatron.core"))
attempt("deepspeed", lambda: prepared("deepspeed"))
"""


def check_env(file: TextIO | None = None) -> dict[str, Part]:
    """Print one [✓] or [✗] line for each part and return what was found, by part.

    Keys: python, torch, cuda, nccl, deepspeed, megatron_core, transformers, vllm, transformer_engine, flash_attn and
    slurm.
    Parts with ``required`` are those without which nothing trains. Never raises for something missing.
    """
    out = sys.stdout if file is None else file
    with ThreadPoolExecutor(max_workers=5) as pool:
        required = pool.submit(_probe)
        pending: list[tuple[str, Callable[[], Part]]] = [
            ("python", _python),
            ("torch", lambda: _torch(required.result())),
            ("cuda", lambda: _cuda(required.result())),
            ("nccl", lambda: _nccl(required.result())),
        ]
        for key, name, distribution in _REQUIRED:
            pending.append((key, partial(_required, key, name, distribution, required)))
        for key, name, distribution, module, off in _OPTIONAL:
            pending.append((key, pool.submit(_optional, name, distribution, module, off).result))
        pending.append(("slurm", _slurm))
        found: dict[str, Part] = {}
        for key, result in pending:
            part = found[key] = result()
            words = " ".join(word for word in (part["name"], part["version"]) if word)
            detail = f": {part['detail']}" if part["detail"] else ""
            print(f"[{'✓' if part['ok'] else '✗'}] {words}{detail}", file=out, flush=True)
    lacking = [part["name"] for part in found.values() if part["required"] and not part["ok"]]
    if lacking:
        print(f"Required and missing: {', '.join(lacking)}. Install with: pip install rl3d", file=out, flush=True)
    return found


def _part(name: str, ok: bool, found: str = "", detail: str = "", required: bool = False) -> Part:
    return {"ok": ok, "required": required, "name": name, "version": found, "detail": detail}


def _python() -> Part:
    ok = sys.version_info >= (3, 12)
    found = ".".join(map(str, sys.version_info[:3]))
    return _part("Python", ok, found, "" if ok else "3.12 or newer is needed", required=True)


def _run(code: str, timeout: float = 300) -> tuple[str, str]:
    """Run Python code apart; (its output, what went wrong: empty when nothing did)."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return output if isinstance(output, str) else output.decode(), f"not done after {timeout:.0f} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    wrong = f"exit code {done.returncode}" + (f", {lines[-1]}" if lines else "")
    return done.stdout, wrong if done.returncode else ""


def _probe() -> dict[str, dict[str, Any]]:
    """What the required libraries say of themselves when imported, by part."""
    output, wrong = _run(_PROBE)
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith("RL3D"):
            found.update(json.loads(line.removeprefix("RL3D")))
    for key in ("torch", "transformers", "megatron_core", "deepspeed"):
        found.setdefault(key, {"ok": False, "error": wrong or "it said nothing"})
    return found


def _torch(probe: dict[str, dict[str, Any]]) -> Part:
    facts = probe["torch"]
    if facts["ok"]:
        return _part("PyTorch", True, facts["version"], required=True)
    installed = _installed("torch")
    detail = f"import fails: {facts['error']}" if installed else "not installed; pip install torch"
    return _part("PyTorch", False, installed, detail, required=True)


def _cuda(probe: dict[str, dict[str, Any]]) -> Part:
    facts = probe["torch"]
    if not facts["ok"]:
        return _part("CUDA", False, "", "needs PyTorch")
    gpus = facts["gpus"]
    if gpus:
        kinds = ", ".join(sorted(set(gpus)))
        return _part("CUDA", True, facts["cuda"] or "", f"{len(gpus)} device{'s' * (len(gpus) > 1)} ({kinds})")
    build = "this PyTorch is a CPU build, " if facts["cuda"] is None else ""
    return _part("CUDA", False, facts["cuda"] or "", f"0 devices; {build}ranks run on the CPU with gloo")


def _nccl(probe: dict[str, dict[str, Any]]) -> Part:
    facts = probe["torch"]
    if not facts["ok"]:
        return _part("NCCL", False, "", "needs PyTorch")
    if not facts["nccl"]:
        return _part("NCCL", False, "", "not in this PyTorch; gloo is used")
    return _part("NCCL", bool(facts["gpus"]), facts["nccl"], "" if facts["gpus"] else "no GPU to use it on; gloo is used")


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _required(key: str, name: str, distribution: str, probe: Future[dict[str, dict[str, Any]]]) -> Part:
    found = _installed(distribution)
    if not found:
        return _part(name, False, "", f"not installed; pip install {distribution}", required=True)
    facts = probe.result()[key]
    return _part(name, facts["ok"], found, "" if facts["ok"] else f"import fails: {facts['error']}", required=True)


def _optional(name: str, distribution: str, module: str, off: str) -> Part:
    found = _installed(distribution)
    if not found:
        return _part(name, False, "", f"not installed; {off}")
    _, wrong = _run(f"import {module}")
    return _part(name, not wrong, found, f"import fails: {wrong}; {off}" if wrong else "")


def _slurm() -> Part:
    srun = shutil.which("srun")
    if srun is None:
        return _part("SLURM", False, "", "srun is not on PATH; start with torchrun, deepspeed or rl3d train")
    try:
        done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return _part("SLURM", False, "", f"srun does not answer: {error}")
    if done.returncode:  # installed, but there is no cluster that it knows of
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].strip()
        return _part("SLURM", False, "", f"srun --version fails: {said}")
    job = os.environ.get("SLURM_JOB_ID")
    found = done.stdout.strip().removeprefix("slurm").strip(" -")
    return _part("SLURM", True, found, f"inside job {job}" if job else "")
