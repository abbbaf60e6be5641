"""Where a process learns its rank: every starter's variables, and every way they can be wrong."""

import pytest

from rl3d.distributed.environment import (
    StartupError,
    detect,
    expand_nodelist,
    expand_tasks_per_node,
    is_launched,
    slurm_port,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_JOB_ID": "31000",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the node list has to be read without SLURM's own tools."""
    monkeypatch.setenv("PATH", "/nowhere")


def test_torchrun() -> None:
    place = detect(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (5, 8, 1, 4, 1)
    assert (place.master_addr, place.master_port, place.starter) == ("node0", 29500, "torchrun")


def test_deepspeed() -> None:
    place = detect(DEEPSPEED)
    assert (place.rank, place.local_world_size, place.node_rank, place.starter) == (3, 2, 1, "deepspeed")


def test_srun() -> None:
    place = detect(SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank) == (6, 7, 2, 3, 1)
    assert (place.master_addr, place.starter) == ("gpu07", "slurm")
    assert place.master_port == slurm_port(SRUN) == 15000 + 31000 % 15000


def test_srun_takes_the_address_it_is_given() -> None:
    place = detect({**SRUN, "MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "12345"})
    assert (place.master_addr, place.master_port) == ("ib-gpu07", 12345)


def test_launcher_variables_win_over_srun() -> None:
    assert detect({**SRUN, **TORCHRUN}).starter == "torchrun"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "left-over"},
        {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"},  # the shell of a batch script
        {**SRUN, "SLURM_STEP_ID": "4294967291"},  # the same, as newer SLURMs mark it
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_plain_processes(env: dict[str, str]) -> None:
    assert not is_launched(env)
    assert (detect(env).rank, detect(env).world_size, detect(env).starter) == (0, 1, "single")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK", "MASTER_ADDR", "missing", "torchrun"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0 set", "RANK, WORLD_SIZE", "unset LOCAL_RANK"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8", "expected 0 <= RANK < WORLD_SIZE"]),
        ({**TORCHRUN, "RANK": "x"}, ["RANK='x'", "whole number"]),
        ({**TORCHRUN, "LOCAL_RANK": "6"}, ["LOCAL_RANK=6", "RANK=5"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1..65535"]),
        ({**SRUN, "SLURM_JOB_NODELIST": ""}, ["SLURM_JOB_NODELIST", "MASTER_ADDR"]),
        ({key: value for key, value in SRUN.items() if key != "SLURM_NODEID"}, ["SLURM_NODEID missing", "srun"]),
    ],
)
def test_errors_name_the_variable_and_the_fix(env: dict[str, str], words: list[str]) -> None:
    assert is_launched(env)
    with pytest.raises(StartupError) as error:
        detect(env)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a[01-03,07],b7", ["a01", "a02", "a03", "a07", "b7"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[3,5].cluster", ["r1n3.cluster", "r1n5.cluster", "r2n3.cluster", "r2n5.cluster"]),
        ("x-1,y-2.site.org", ["x-1", "y-2.site.org"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a]1[", "a[x-y]", "a[[1]]"])
def test_bad_node_lists_raise(text: str) -> None:
    with pytest.raises(StartupError):
        expand_nodelist(text)


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("4(x2),3") == [4, 4, 3]
    assert expand_tasks_per_node("2") == [2]
    assert expand_tasks_per_node("odd") == []


def test_ports_differ_by_job_and_step_and_stay_below_the_ephemeral_range() -> None:
    ports = {slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in (1, 2) for step in (0, 1)}
    assert len(ports) == 4 and all(15000 <= port < 30000 for port in ports)
