"""Which rank is this process? Read from the environment of torchrun, deepspeed or srun. Pure functions, no torch."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from shutil import which

_SLURM_NO_STEP = 0xFFFFFFF0  # the batch and interactive steps carry reserved numbers above this


class StartupError(RuntimeError):
    """The ranks cannot be started as asked; the message names the value and the fix."""


@dataclass(frozen=True)
class Place:
    """A rank's place in the job. ``local_world_size`` and ``node_rank`` are None where the starter does not tell."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    node_rank: int | None
    master_addr: str
    master_port: int
    starter: str  # "torchrun" | "deepspeed" | "env" | "slurm" | "single"


def is_launched(env: Mapping[str, str] | None = None) -> bool:
    """True when something has started this process as one of several ranks (or tried to: see :func:`detect`)."""
    env = os.environ if env is None else env
    return any(key in env for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")) or _in_slurm_step(env)


def detect(env: Mapping[str, str] | None = None) -> Place:
    """The place of this process.

    RANK and company (torchrun, deepspeed, our launcher) win over SLURM_*, because a launcher may itself run under srun.
    A SLURM step of one task, or a batch script's own shell, counts as a plain process.

    Raises:
        StartupError: variables are missing or contradict one another.
    """
    env = os.environ if env is None else env
    if any(key in env for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _check(_from_rank_variables(env))
    if _in_slurm_step(env):
        return _check(_from_slurm(env))
    return Place(0, 1, 0, 1, 0, "127.0.0.1", 0, "single")


def _from_rank_variables(env: Mapping[str, str]) -> Place:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [key for key in needed if not env.get(key)]
    if missing:
        present = ", ".join(f"{key}={env[key]}" for key in needed if env.get(key))
        raise StartupError(
            f"the environment describes a rank only in part: {present} set, {', '.join(missing)} missing. "
            "Start with torchrun, deepspeed, srun or plain `python -m rl3d`, which set all of them, "
            f"or unset {', '.join(key for key in needed[:3] if env.get(key)) or 'them'}."
        )
    starter = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed" if "CROSS_RANK" in env else "env"
    return Place(
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_first_number(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        node_rank=_first_number(env, "GROUP_RANK", "CROSS_RANK", "NODE_RANK"),
        master_addr=env["MASTER_ADDR"],
        master_port=_number(env, "MASTER_PORT"),
        starter=starter,
    )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in env or "SLURM_LOCALID" not in env:
        return False
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or not step.isdigit() or int(step) >= _SLURM_NO_STEP:
        return False  # the batch shell has SLURM_PROCID=0 and SLURM_NTASKS=n too, but is no rank
    return int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))) > 1


def _from_slurm(env: Mapping[str, str]) -> Place:
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    missing = [key for key in needed if not env.get(key)]
    if missing:
        raise StartupError(
            f"inside a SLURM step, but {', '.join(missing)} missing: start the ranks with "
            "`srun python -m rl3d train CONFIG` and let srun pass its environment on (--export=ALL)."
        )
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    master_addr = env.get("MASTER_ADDR") or first_host(nodelist)
    node_rank = _number(env, "SLURM_NODEID")
    sizes = expand_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return Place(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, size_key),
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=sizes[node_rank] if node_rank < len(sizes) else None,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=_number(env, "MASTER_PORT") if env.get("MASTER_PORT") else slurm_port(env),
        starter="slurm",
    )


def slurm_port(env: Mapping[str, str]) -> int:
    """A port all ranks agree on without talking: from job and step number, below the ephemeral range."""
    job = int(env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", "0")))
    step = int(env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0")))
    return 15000 + (job + 997 * step) % 15000


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list; asks `scontrol` when it is there, else reads the list itself."""
    if not nodelist:
        raise StartupError("SLURM_JOB_NODELIST is not set: set MASTER_ADDR to the host name of rank 0.")
    if which("scontrol"):
        try:
            run = subprocess.run(
                ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, timeout=10, check=True
            )
            if hosts := run.stdout.split():
                return hosts[0]
        except (subprocess.SubprocessError, OSError):
            pass  # a container without the controller's address: read the list instead
    return expand_nodelist(nodelist)[0]


def expand_nodelist(nodelist: str) -> list[str]:
    """``a[01-03,07],b7`` -> ``["a01", "a02", "a03", "a07", "b7"]``; several brackets in a name multiply out.

    Raises:
        StartupError: the list is empty or its brackets do not match.
    """
    hosts: list[str] = []
    for term in _split_outside_brackets(nodelist):
        names = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", term):
            parts = [text] if text else _expand_ranges(ranges, nodelist)
            names = [name + part for name in names for part in parts]
        hosts += names
    if not hosts:
        raise StartupError(f"empty SLURM node list {nodelist!r}")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    terms, depth, current = [], 0, ""
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            terms.append(current)
            current = ""
        else:
            current += char
    if depth != 0:
        raise StartupError(f"brackets do not match in the SLURM node list {text!r}")
    return [term for term in [*terms, current] if term]


def _expand_ranges(ranges: str, nodelist: str) -> list[str]:
    out = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None:
            raise StartupError(f"cannot read [{ranges}] in the SLURM node list {nodelist!r}: expected e.g. [01-03,07]")
        low, high = match.group(1), match.group(2) or match.group(1)
        out += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return out


def expand_tasks_per_node(text: str) -> list[int]:
    """``4(x2),3`` -> ``[4, 4, 3]``; an empty list when it cannot be read."""
    sizes: list[int] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return []
        sizes += [int(match.group(1))] * int(match.group(2) or 1)
    return sizes


def _number(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise StartupError(f"{key}={env[key]!r}: expected a whole number") from None


def _first_number(env: Mapping[str, str], *keys: str) -> int | None:
    return next((_number(env, key) for key in keys if env.get(key)), None)


def _check(place: Place) -> Place:
    if place.world_size < 1 or not 0 <= place.rank < place.world_size:
        raise StartupError(
            f"RANK={place.rank} with WORLD_SIZE={place.world_size}: expected 0 <= RANK < WORLD_SIZE. "
            "Check the number of ranks given to the launcher on every node."
        )
    if place.local_rank < 0 or place.local_rank > place.rank:
        raise StartupError(
            f"LOCAL_RANK={place.local_rank} with RANK={place.rank}: expected 0 <= LOCAL_RANK <= RANK "
            "(ranks are counted through the nodes, local ranks within one)."
        )
    if not 0 < place.master_port < 65536:
        raise StartupError(f"MASTER_PORT={place.master_port}: expected 1..65535")
    return place
