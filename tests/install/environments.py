"""Wheels and virtual environments for the tests of installing. Nothing is asked of a package index."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rl3d", "configs", "examples", "launch", "slurm", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md",
           "LICENSE", "constraints.txt", "Makefile")  # fmt: skip


def build_wheel(directory: Path) -> Path:
    """rl3d's wheel, built from a copy of the sources, so that no earlier build leaves anything in it."""
    source = directory / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(directory), str(source))
    (wheel,) = directory.glob("rl3d-*.whl")
    return wheel


def make_environment(directory: Path, *wheels: Path) -> str:
    """A virtual environment with ``wheels``; behind its own packages it sees those of this interpreter. Its python."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(directory)
    python = str(directory / "bin" / "python")
    (own,) = directory.glob("lib/python*/site-packages")
    # a line in a .pth file comes after the environment's own packages, and .pth files there (editable installs) stay unread
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for wheel in wheels:
        pip(python, "install", "-q", "--no-deps", "--force-reinstall", str(wheel))
    return python


def pip(python: str, command: str, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run pip without any index and without this machine's settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") and key != "PYTHONPATH"}
    env["PIP_CONFIG_FILE"] = os.devnull
    command_line = [python, "-m", "pip", command, "--no-index", *words]
    done = subprocess.run(command_line, env=env, capture_output=True, text=True, timeout=120, cwd="/")
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def stand_in(directory: Path, name: str, version: str) -> Path:
    """A wheel that holds nothing but its name and version."""
    info = f"{name}-{version}.dist-info"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel
