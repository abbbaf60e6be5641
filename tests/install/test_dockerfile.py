"""The Dockerfile, read as a builder reads it: its instructions, the files it copies, the shell and Python in it."""

import os
import re
import shlex
import subprocess
import sys

from tests.install.environments import ROOT, SOURCES, stand_in

PATH = ROOT / "launch" / "Dockerfile"


def instructions():
    """(name, rest) of each, comments gone and continued lines joined."""
    lines = [line for line in PATH.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_every_instruction_is_one_and_the_user_is_nobody_special():
    found = instructions()
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} == known
    assert found[0][0] == "ARG" and [rest for name, rest in found if name == "FROM"] == ["${BASE} AS wheel", "${BASE}"]
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["rl3d"] and found.index(("USER", "rl3d")) > max(i for i, (name, _) in enumerate(found) if name == "RUN")
    assert "://" not in PATH.read_text() and "index" not in "".join(rest for name, rest in found if name == "RUN")


def test_it_copies_what_the_wheel_is_built_from():
    copied = []
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            copied += shlex.split(rest)[:-1]
    assert sorted(copied) == sorted(SOURCES) and all((ROOT / source).exists() for source in copied)


def test_its_commands_are_shell_and_python(tmp_path):
    """The check of the base and the pin of its torch run here, beside stand-ins for torch."""
    runs = [rest for name, rest in instructions() if name == "RUN"]
    for run in runs:
        done = subprocess.run(["bash", "-n", "-c", run], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    check, pin = shlex.split(runs[0])[2], shlex.split(runs[2])[2]
    for version, ok in (("2.11.0a0+x.nv26", True), ("2.14.1", True), ("2.10.0", False), ("2.15.0", False)):
        stand_in(tmp_path, "torch", version)
        env = {
            **os.environ,
            "PYTHONPATH": str(tmp_path / f"torch-{version}-py3-none-any.whl"),
        }  # a wheel is a zip: importable
        done = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, text=True)
        assert (done.returncode == 0) == ok and (ok or f"torch {version}; rl3d needs" in done.stderr), done.stderr
        done = subprocess.run([sys.executable, "-c", pin], env=env, capture_output=True, text=True)
        assert done.stdout == f"torch=={version}\n"
