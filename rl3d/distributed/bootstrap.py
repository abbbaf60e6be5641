"""From a started process to a working process group: ``runtime = bootstrap.init()`` on every rank."""

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import platform
from rl3d.distributed.environment import Place, StartupError, detect, free_port


@dataclass
class Runtime:
    """What a rank knows about itself and the job. Made by :func:`init`; there is one per process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str  # "nccl" | "gloo": what carries CUDA tensors (gloo on a CPU); CPU tensors always go through gloo
    timeout_s: float  # of every collective and every wait
    nodes: tuple[int, ...]  # node of each rank; nodes are numbered in order of their first rank
    cpu_group: Any  # all ranks; takes CPU tensors and Python objects without touching the device
    store: Any  # c10d store shared by all ranks; threads take a connection of their own with new_store()
    starter: str = "single"
    before_leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)  # called by shutdown()
    registries: dict[str, Any] = field(default_factory=dict, repr=False)  # process groups made so far, by purpose
    _closed: bool = field(default=False, repr=False)

    def new_store(self) -> Any:
        """A store with a connection of its own, for another thread (a blocking wait holds its connection)."""
        return self.store.clone()

    def barrier(self) -> None:
        """Wait for all ranks on the CPU group (no device synchronisation); fails after ``timeout_s``."""
        dist.barrier(group=self.cpu_group)

    def shutdown(self) -> None:
        """Leave together: waits for all ranks, then ends the process groups. Safe to call twice."""
        global _runtime
        if self._closed:
            return
        self._closed = True
        if dist.is_initialized():
            try:
                if self.world_size > 1:
                    self.barrier()
                for action in self.before_leaving:
                    action()
                if self.world_size > 1:
                    # Rank 0 may host the store, so it goes last: a late reader would find the connection gone.
                    _leave_after_others(self)
            finally:
                dist.destroy_process_group()
                _forget_deepspeed_backend()
        _runtime = None


_runtime: Runtime | None = None


def init(timeout_s: float = 600, device: str = "auto") -> Runtime:
    """Join the job this process was started for; a plain process becomes a job of one rank.

    Args:
        timeout_s: limit in seconds for the ranks to meet, and for every collective afterwards.
        device: "auto" (CUDA when there is one), "cuda" or "cpu".

    Raises:
        StartupError: the environment, the ranks or the devices do not fit together; names the fix.
    """
    global _runtime
    if _runtime is not None:
        return _runtime
    if dist.is_initialized():
        raise StartupError(
            "torch.distributed was initialised before rl3d: call rl3d.distributed.bootstrap.init() in its place; before "
            "vLLM is started, if a vLLM in this process did it."
        )
    place = detect()
    platform.prepare()
    timeout = timedelta(seconds=timeout_s)
    use_cuda = _wants_cuda(device)
    if place.starter == "single":
        place = Place(0, 1, 0, 1, 0, "127.0.0.1", free_port(), "single")
    _export(place)

    store = _connect(place, timeout)
    cards = _meet(store, place, timeout_s, _local_card(place) if use_cuda else "")
    nodes, local_world_size = _number_nodes(cards, place)
    platform.set_threads(local_world_size)
    backend = "gloo"
    chosen = torch.device("cpu")
    if use_cuda:
        shared = _check_sharing(cards)
        chosen = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        backend = _cuda_backend(shared)
    # On CUDA the default group has both: CPU tensors, Python objects and dist.barrier() go through gloo. A barrier of
    # NCCL would block the device's queue, and with it what a ControlChannel carries out meanwhile. A bound device_id
    # would make barriers NCCL's again.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=dist.PrefixStore("rl3d/c10d", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    _runtime = Runtime(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=local_world_size,
        node_rank=nodes[place.rank],
        device=chosen,
        backend=backend,
        timeout_s=timeout_s,
        nodes=nodes,
        cpu_group=dist.group.WORLD,
        store=dist.PrefixStore("rl3d/run", store),
        starter=place.starter,
    )
    atexit.register(_at_exit, _runtime)
    return _runtime


def _at_exit(runtime: Runtime) -> None:
    """A script that ends without :meth:`Runtime.shutdown`: stop the threads, or they meet a dying interpreter.

    Nobody is waited for: the other ranks may have failed.
    """
    global _runtime
    if runtime._closed:
        return
    runtime._closed = True
    for action in runtime.before_leaving:
        action()
    if dist.is_initialized():
        dist.destroy_process_group()
    _runtime = None


def current() -> Runtime | None:
    """The runtime made by :func:`init`, or None."""
    return _runtime


def init_deepspeed() -> None:
    """Give DeepSpeed the process group that exists. Compiles nothing, starts nothing; idempotent.

    Raises:
        StartupError: :func:`init` was not called first.
    """
    if not dist.is_initialized():
        raise StartupError("init_deepspeed() before bootstrap.init(): there is no process group for DeepSpeed to use.")
    platform.prepare()
    import deepspeed
    import deepspeed.comm

    if not deepspeed.comm.is_initialized():
        timeout = timedelta(seconds=_runtime.timeout_s if _runtime else 600)
        deepspeed.init_distributed(
            dist_backend=_runtime.backend if _runtime else dist.get_backend(),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
        )


# ---- meeting


def _export(place: Place) -> None:
    """DeepSpeed, transformers and vLLM read these; under srun and in a plain process nobody has set them."""
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    if place.starter != "single":
        os.environ.update({key: str(value) for key, value in values.items()})


def _connect(place: Place, timeout: timedelta) -> Any:
    # torchrun's agent already listens on MASTER_PORT; everywhere else rank 0 does.
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            is_master=place.rank == 0 and not agent_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError) as error:
        where = f"{place.master_addr}:{place.master_port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise StartupError(
                f"rank 0 cannot listen on {where}: the port is in use, perhaps by another job. "
                f"Set MASTER_PORT to another number on every rank (now {place.master_port})."
            ) from None
        if "EADDRNOTAVAIL" in str(error):
            raise StartupError(
                f"rank 0 cannot listen on {where}: the address is not one of this machine. "
                "Set MASTER_ADDR to the host that runs rank 0."
            ) from None
        raise StartupError(
            f"rank {place.rank} did not reach rank 0 at {where} within {timeout.total_seconds():.0f} s: "
            f"check MASTER_ADDR, MASTER_PORT, firewalls, and that rank 0 runs. ({_first_line(error)})"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rl3d/{attempt}", store)


def _meet(store: Any, place: Place, timeout_s: float, gpu: str) -> list[dict[str, str]]:
    """Wait until every rank has handed in its card (world size, host, GPU); returns the cards by rank."""
    if store.add(f"boot/count/{place.rank}", 1) > 1:
        raise StartupError(
            f"two processes claim RANK={place.rank} of WORLD_SIZE={place.world_size} at "
            f"{place.master_addr}:{place.master_port}: give every process a RANK of its own, and every job a "
            "MASTER_PORT of its own."
        )
    card = {"world_size": str(place.world_size), "host": _host_identity(), "gpu": gpu}
    store.set(f"boot/card/{place.rank}", json.dumps(card))
    if place.rank == 0:
        store.set("boot/world_size", str(place.world_size))
    if not _poll(store, ["boot/world_size"], timeout_s):
        raise StartupError(f"rank 0 did not say its WORLD_SIZE within {timeout_s:.0f} s: look at its log.")
    world_size_0 = int(store.get("boot/world_size"))
    if world_size_0 != place.world_size:
        message = (
            f"WORLD_SIZE={place.world_size} on rank {place.rank}, but WORLD_SIZE={world_size_0} on rank 0: "
            "start every node with the same number of nodes and of ranks per node."
        )
        store.set("boot/mismatch", message)  # so that the ranks that agree do not wait for the time-out
        raise StartupError(message)
    keys = [f"boot/card/{rank}" for rank in range(place.world_size)]
    if not _poll(store, keys, timeout_s):
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise StartupError(
            f"{len(absent)} of {place.world_size} ranks did not arrive within {timeout_s:.0f} s: rank(s) "
            f"{', '.join(map(str, absent))}. Look at their logs; was every node started with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE?"
        )
    return [json.loads(value) for value in store.multi_get(keys)]


def _poll(store: Any, keys: list[str], timeout_s: float) -> bool:
    """Wait for keys, but not past a rank that has given up; False when the time is over."""
    end = time.monotonic() + timeout_s
    pause = 0.005
    while not store.check(keys):
        if store.check(["boot/mismatch"]):
            raise StartupError(store.get("boot/mismatch").decode())
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)
    return True


def _host_identity() -> str:
    """Host name and boot: two containers of one name differ, two ranks of one machine agree."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _number_nodes(cards: list[dict[str, str]], place: Place) -> tuple[tuple[int, ...], int]:
    numbers: dict[str, int] = {}
    nodes = tuple(numbers.setdefault(card["host"], len(numbers)) for card in cards)
    return nodes, nodes.count(nodes[place.rank])


def _leave_after_others(runtime: Runtime) -> None:
    done = [f"bye/{rank}" for rank in range(1, runtime.world_size)]
    if runtime.rank != 0:
        runtime.store.set(f"bye/{runtime.rank}", "1")
        return
    try:
        runtime.store.wait(done, timedelta(seconds=min(30.0, runtime.timeout_s)))
    except (dist.DistError, RuntimeError):
        return  # a rank died on its way out; its launcher reports that


def _forget_deepspeed_backend() -> None:
    """DeepSpeed keeps its own flag; clear it so that a later init() starts afresh."""
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# ---- devices


def _wants_cuda(device: str) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise StartupError(f"device={device!r}: expected 'auto', 'cpu' or 'cuda'")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise StartupError(
            "device='cuda', but torch sees no CUDA device: use device='cpu', or check `nvidia-smi`, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')} and that torch is a CUDA build."
        )
    return available and device != "cpu"


def _local_card(place: Place) -> str:
    """Identity of the GPU this rank takes: LOCAL_RANK among the visible ones (one is visible per rank: that one)."""
    index = place.local_rank % torch.cuda.device_count()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid) if uuid is not None else f"index {index} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def _check_sharing(cards: list[dict[str, str]]) -> bool:
    """True when ranks share a GPU on purpose; an error when they do so by accident."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, card in enumerate(cards):
        holders.setdefault((card["host"], card["gpu"]), []).append(rank)
    shared = [ranks for ranks in holders.values() if len(ranks) > 1]
    if shared and os.environ.get("RL3D_SHARE_GPU") != "1":
        raise StartupError(
            f"ranks {', '.join(map(str, shared[0]))} would share one GPU: start one rank per GPU (fewer ranks, or more "
            "visible devices: CUDA_VISIBLE_DEVICES, --gpus-per-task), or set RL3D_SHARE_GPU=1 if that is meant."
        )
    return bool(shared)


def _cuda_backend(shared: bool) -> str:
    """NCCL, except for several ranks on one GPU with an NCCL that refuses them: then gloo (slow, no CUDA send/recv)."""
    if not shared:
        return "nccl"
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return "nccl" if _nccl_version() >= 23000 else "gloo"


def _nccl_version() -> int:
    """Version of the NCCL in this process, major * 10000 + minor * 100 + patch; torch tells the one it was built with."""
    import ctypes

    found = ctypes.c_int(0)
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(found))
    except AttributeError:  # NCCL is linked in, or loaded where the global scope does not show it
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return major * 10000 + minor * 100 + patch
    return found.value
