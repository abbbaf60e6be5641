"""The memory plan in a run: checked before any weight is read, and compared with what was measured."""

import sys

import torch
import torch.distributed as dist

from rl3d.config import ConfigError, RunConfig, read_hf_config
from rl3d.distributed.bootstrap import Runtime
from rl3d.distributed.devices import host_memory
from rl3d.estimate.check import Capacity, problem
from rl3d.estimate.memory import CONTEXT, MemoryPlan
from rl3d.estimate.request import Request
from rl3d.estimate.table import shown, summary
from rl3d.utils.peaks import PhasePeaks

PHASES = {
    "gen": ("switch", "generation"),
    "old_log_prob": ("old log-probabilities",),
    "ref": ("reference",),
    "values": ("values",),
    "update_critic": ("critic update", "critic step"),
    "update_actor": ("update", "optimiser step"),
}
"""Phases as the timings name them -> phases of the plan."""


def check_memory(config: RunConfig, runtime: Runtime) -> MemoryPlan:
    """Plan the memory of a run, say so on rank 0, and refuse it where it does not fit. Collective.

    Raises:
        ConfigError: with ``trainer.memory_check`` strict, on every rank, when the device of any cannot hold its part.
    """
    limit_memory(config, runtime)
    whole = torch.cuda.mem_get_info(runtime.device)[1] if runtime.device.type == "cuda" else None
    request = Request.of(config, read_hf_config(config), whole)
    plan = request.plan()
    capacity = _capacity(config, runtime)
    if runtime.rank == 0:
        print(f"{summary(plan)}; {capacity.source} gives it {shown(capacity.bytes)}", flush=True)
    if config.trainer.memory_check == "off":
        return plan
    least = torch.tensor([capacity.bytes, -1 if capacity.host is None else capacity.host], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=runtime.cpu_group)
    host = None if least[1] < 0 else int(least[1])
    wrong = problem(request, Capacity(int(least[0]), capacity.source, host), plan)
    if wrong is None:
        return plan
    if config.trainer.memory_check == "strict":
        raise ConfigError(wrong)
    if runtime.rank == 0:
        print(f"warning: {wrong}", file=sys.stderr, flush=True)
    return plan


def limit_memory(config: RunConfig, runtime: Runtime) -> None:
    """Make torch's allocator refuse what lies beyond ``layout.memory_limit_gb``, context and NCCL taken off it.

    What is mapped beside it, the key/value cache, is within the same limit (:mod:`rl3d.utils.device_memory`).
    """
    limit = config.layout.memory_limit_gb
    if limit is None or runtime.device.type != "cuda":
        return
    _, total = torch.cuda.mem_get_info(runtime.device)
    share = (limit * 1e9 - CONTEXT) / total
    torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), runtime.device)


def _capacity(config: RunConfig, runtime: Runtime) -> Capacity:
    available = host_memory()
    host = None if available is None else available // runtime.local_world_size
    if runtime.device.type != "cuda":
        limit = config.layout.memory_limit_gb
        room = Capacity(1 << 60 if host is None else host, f"the host, shared by {runtime.local_world_size} ranks,")
        return room if limit is None or limit * 1e9 > room.bytes else _limited(limit)
    free, total = torch.cuda.mem_get_info(runtime.device)
    own = min(CONTEXT, total - free)  # this process's context, which the plan counts, is there already
    name = torch.cuda.get_device_name(runtime.device)
    limit = config.layout.memory_limit_gb
    if limit is not None and limit * 1e9 < free + own:
        return _limited(limit, host)
    return Capacity(free + own, f"{name} ({total / 1e9:.1f} GB, {free / 1e9:.1f} free)", host)


def _limited(limit: float, host: int | None = None) -> Capacity:
    return Capacity(int(limit * 1e9), f"layout.memory_limit_gb = {limit:g}", host)


def metrics(peaks: PhasePeaks, plan: MemoryPlan | None) -> dict[str, float]:
    """``memory/<phase>_gb``, this rank's measured peak, and ``memory/<phase>_predicted_gb`` of the worst rank beside it."""
    out = {f"memory/{name}_gb": size / 1e9 for name, size in peaks.phases.items()}
    if plan is not None:
        out["memory/predicted_gb"] = plan.peak / 1e9
        sizes = {phase.name: phase.bytes for phase in plan.phases}
        for name, phases in PHASES.items():
            predicted = [sizes[phase] for phase in phases if phase in sizes]
            if predicted and name in peaks.phases:
                out[f"memory/{name}_predicted_gb"] = max(predicted) / 1e9
    return out


def outcome(peaks: PhasePeaks, plan: MemoryPlan | None, runtime: Runtime) -> str | None:
    """``peak 41.2 GB, predicted 43.0 GB``, the highest peak of all ranks; None on a CPU. Collective."""
    highest = torch.tensor([float(peaks.overall)], dtype=torch.float64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=runtime.cpu_group)
    if not highest[0]:
        return None
    predicted = "" if plan is None else f", predicted {plan.peak / 1e9:.1f} GB"
    return f"peak {float(highest[0]) / 1e9:.1f} GB{predicted}"
