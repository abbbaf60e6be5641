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
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
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
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": "", "kernels": [], "needs": []}
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["kernels"] = torch.cuda.get_arch_list()
        found["needs"] = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
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
        wrong = _out_of_range("torch", facts["version"])
        return _part("PyTorch", not wrong, facts["version"], wrong, required=True)
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
        lacking = sorted({f"sm_{a}{b}" for a, b in facts["needs"] if not _has_kernels(facts["kernels"], a, b)})
        wrong = (
            f"; but this PyTorch has kernels for {', '.join(facts['kernels'])} and not for {', '.join(lacking)}: install a "
            "build of PyTorch for another CUDA version"
        )
        detail = f"{len(gpus)} device{'s' * (len(gpus) > 1)} ({kinds}){wrong if lacking else ''}"
        return _part("CUDA", not lacking, facts["cuda"] or "", detail)
    if not _gpu_present():
        build = "this PyTorch is a CPU build, " if facts["cuda"] is None else ""
        return _part("CUDA", False, facts["cuda"] or "", f"0 devices; {build}ranks run on the CPU with gloo")
    if facts["cuda"] is None:
        detail = "this machine has a GPU and this PyTorch is a CPU build; install one with CUDA to use it"
    else:
        detail = "this machine has a GPU that this PyTorch cannot use: is the driver older than its CUDA, or "
        detail += "CUDA_VISIBLE_DEVICES set? Update the driver, or install a build for an older CUDA"
    return _part("CUDA", False, facts["cuda"] or "", detail)


def _has_kernels(kernels: list[str], major: int, minor: int) -> bool:
    """Code for sm_86 runs on 8.6 and later 8.x; PTX (compute_90) on 9.0 and everything later. sm_90a is 9.0 alone."""
    for name in kernels:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and built <= (major, minor):
            return True
        if built[0] == major and built[1] <= minor and (digits == number or built[1] == minor):
            return True
    return not kernels  # a build that does not tell


def _gpu_present() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _out_of_range(distribution: str, found: str) -> str:
    """What is wrong with a version, by what this rl3d asks for in its own metadata; empty when nothing is."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(text) for text in requires("rl3d") or []]
    except (ImportError, PackageNotFoundError):  # a checkout that is not installed asks for nothing
        return ""
    for requirement in asked:
        if requirement.name == distribution and not requirement.specifier.contains(found, prereleases=True):
            text = f"rl3d needs {requirement.specifier}; "
            if distribution == "torch":
                return text + "install such a build for your CUDA version, or use an environment or container that has one"
            return text + f"pip install '{requirement.name}{requirement.specifier}'"
    return ""


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
    wrong = _out_of_range(distribution, found) if facts["ok"] else f"import fails: {facts['error']}"
    return _part(name, not wrong, found, wrong, required=True)


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
