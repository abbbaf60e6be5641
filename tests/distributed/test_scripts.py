"""The launch scripts: they parse, explain themselves, and refuse what cannot work before anything is started."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "slurm" / "train.sbatch"])
LAUNCHERS = [path for path in SCRIPTS if path.suffix == ".sh"]


def _run(path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(path), *args], env={**os.environ, **env}, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_them(path: Path) -> None:
    check = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_help(path: Path) -> None:
    assert os.access(path, os.X_OK)
    asked = _run(path, "--help")
    assert asked.returncode == 0 and f"launch/{path.name} CONFIG [key=value ...]" in asked.stdout
    assert "NPROC" in asked.stdout and "set -euo" not in asked.stdout
    assert _run(path).returncode == 2


def test_several_nodes_need_an_address(tmp_path: Path) -> None:
    torchrun = ROOT / "launch" / "torchrun.sh"
    assert "set NODE_RANK" in _run(torchrun, "x.yaml", NNODES="2").stderr
    assert "set MASTER_ADDR" in _run(torchrun, "x.yaml", NNODES="2", NODE_RANK="1").stderr
    hosts = tmp_path / "hosts"
    hosts.write_text("# two nodes\nelsewhere1 slots=4\nelsewhere2 slots=4\n")
    assert "has no line for host" in _run(torchrun, "x.yaml", HOSTFILE=str(hosts)).stderr
    deepspeed = ROOT / "launch" / "deepspeed.sh"
    assert "HOSTFILE" in _run(deepspeed, "x.yaml", NNODES="2").stderr
    assert "cannot be read" in _run(deepspeed, "x.yaml", HOSTFILE=str(tmp_path / "none")).stderr


@pytest.mark.parametrize(
    ("script", "env", "expected"),
    [
        ("local.sh", {"NPROC": "4"}, "python -m rl3d train run.yaml --ranks 4 trainer.steps=2"),
        ("local.sh", {}, "python -m rl3d train run.yaml trainer.steps=2"),
        (
            "torchrun.sh",
            {"NPROC": "2"},
            "torchrun --standalone --nproc-per-node 2 -m rl3d train run.yaml trainer.steps=2",
        ),
        (
            "torchrun.sh",
            {"HOSTFILE": "two hosts"},
            "torchrun --nnodes 2 --node-rank 1 --master-addr first --master-port 29500 --nproc-per-node 3 "
            "-m rl3d train run.yaml trainer.steps=2",
        ),
        (
            "deepspeed.sh",
            {"NPROC": "2"},
            "deepspeed --log_level warning --num_gpus 2 --master_port 29500 --no_local_rank --module rl3d train "
            "run.yaml trainer.steps=2",
        ),
        (
            "deepspeed.sh",
            {"HOSTFILE": "two hosts", "NODE_RANK": "1", "MASTER_PORT": "3"},
            "deepspeed --log_level warning --hostfile HOSTS --master_addr first --no_ssh --node_rank 1 --master_port 3 "
            "--no_local_rank --module rl3d train run.yaml trainer.steps=2",
        ),
    ],
)
def test_what_they_start(tmp_path: Path, script: str, env: dict[str, str], expected: str) -> None:
    """The script is copied beside stand-ins of the programs, which print how they were called."""
    (tmp_path / "launch").mkdir()
    copy = tmp_path / "launch" / script
    copy.write_text((ROOT / "launch" / script).read_text())
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "torchrun", "deepspeed"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tools / name).chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"first slots=3\n{os.uname().nodename} slots=3\n")
    given = {key: str(hosts) if value == "two hosts" else value for key, value in env.items()}
    clean = {key: "" for key in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "HOSTFILE")}
    run = _run(copy, "run.yaml", "trainer.steps=2", **{**clean, **given})
    assert run.stdout.split() == expected.replace("HOSTS", str(hosts)).split(), run.stderr


SRUN = """#!/bin/bash
for word in "$@"; do case $word in --output=*) log=${word#--output=} ;; esac; done
trap 'echo "Stopped by SIGUSR1 after 3 steps" >>"${log/\\%t/0}"; exit %s' USR1
touch started
for i in $(seq 600); do sleep 0.1; done
"""


@pytest.mark.parametrize("code", [75, 143])
def test_the_batch_job_goes_back_to_the_queue_when_its_time_is_up(tmp_path: Path, code: int) -> None:
    """srun and scontrol are stand-ins; the shell gets the scheduler's signal, as with --signal=B:USR1."""
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, text in (("srun", SRUN.replace("%s", str(code))), ("scontrol", '#!/bin/sh\necho "$@" >>calls\necho node0\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {**os.environ, "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "run"}
    job = subprocess.Popen(["bash", str(ROOT / "slurm/train.sbatch"), "run.yaml"], cwd=tmp_path, env=env, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    end = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0 and "back to the queue" in out, err
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "requeue 77"


def test_the_batch_script_starts_ranks_with_srun_and_works_out_the_address() -> None:
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    assert re.search(r'^MASTER_ADDR=\$\(scontrol show hostnames "\$SLURM_JOB_NODELIST" \| head -n 1\)$', text, re.M)
    assert re.search(r"^srun .*--kill-on-bad-exit=1 .*rank%t\.log.* python -m rl3d train", text, re.M)
    assert "MASTER_ADDR=$(hostname" not in text
