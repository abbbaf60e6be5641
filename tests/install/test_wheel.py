"""The built wheel holds all that a user needs, and works where there is no checkout."""

import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from rl3d.config import shipped
from tests.install.environments import ROOT, make_environment

SHIPPED = sorted(
    path
    for name in shipped.FOLDERS
    for path in (ROOT / name).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)


def test_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in SHIPPED:
            assert archive.read(f"rl3d/share/{path.relative_to(ROOT)}") == path.read_bytes()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    for path in (ROOT / "rl3d").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    assert {name.split("/")[0] for name in names} <= {
        "rl3d",
        "checkpoints_tools",
        f"rl3d-{wheel.name.split('-')[1]}.dist-info",
    }
    assert "Requires-Dist: torch<2.15,>=2.11.0.dev0" in metadata and "Requires-Python: >=3.12" in metadata


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("venv"), wheel)


def rl3d(python, cwd: Path, *words: object, timeout: float = 60) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(Path(python).with_name("rl3d")), *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def test_commands_in_an_empty_directory(python, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "rollout.max_new_tokens" in rl3d(python, empty, "config").stdout
    for name in ("tiny_learns", "tiny_learns.yaml", "configs/tiny_learns.yaml"):
        done = rl3d(python, empty, "train", name, "--dry-run", "trainer.steps=3")
        assert done.returncode == 0 and "tp2.pp2.dp1.zero1" in done.stdout and "runs/tiny_learns" in done.stdout, done.stderr
    wrong = rl3d(python, empty, "train", "configs/nope.yaml", "--dry-run")
    brought = ", ".join(sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
    assert wrong.returncode == 2 and f"rl3d brings {brought}\n" in wrong.stderr
    places = rl3d(python, empty, "files").stdout.split()
    assert [Path(place).name for place in places] == list(shipped.FOLDERS)
    assert all(Path(place).is_relative_to(Path(python).parents[1]) for place in places), "the wheel's, not the checkout's"
    assert list(empty.iterdir()) == []


def test_files_are_copied_out_and_never_over_others(python, tmp_path):
    done = rl3d(python, tmp_path, "files", "project")
    assert done.returncode == 0, done.stderr
    for path in SHIPPED:
        copy = tmp_path / "project" / path.relative_to(ROOT)
        assert copy.read_bytes() == path.read_bytes() and str(copy.relative_to(tmp_path)) in done.stdout
    script = tmp_path / "project/launch/local.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    assert rl3d(python, tmp_path, "files", "project").stdout == "", "equal files stay"
    script.write_text("mine")
    (tmp_path / "project/configs/quickstart.yaml").unlink()
    refused = rl3d(python, tmp_path, "files", "project")
    assert refused.returncode == 2 and "launch/local.sh: there already" in refused.stderr and script.read_text() == "mine"
    assert not (tmp_path / "project/configs/quickstart.yaml").exists(), "refused before anything is written"


def test_one_configuration_from_a_file_of_that_name(python, tmp_path):
    """A file in the working directory goes before the shipped one."""
    text = yaml.safe_load((ROOT / "configs/tiny_learns.yaml").read_text())
    text["trainer"] = {"name": "mine", "steps": 1}
    (tmp_path / "tiny_learns.yaml").write_text(yaml.safe_dump(text))
    assert "runs/mine" in rl3d(python, tmp_path, "train", "tiny_learns.yaml", "--dry-run").stdout


@pytest.mark.slow
def test_training_from_the_wheel(python, tmp_path):
    words = ("train", "tiny_learns", "layout.train=tp1.pp1.zero1", "layout.gen=tp1", "layout.ranks=1", "trainer.steps=1")
    done = rl3d(python, tmp_path, *words, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/tiny_learns"
    assert json.loads((run / "metrics.jsonl").read_text())["step"] == 0
    assert (run / "hf/model.safetensors").is_file()
