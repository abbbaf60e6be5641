"""Whether a run fits its devices, and what to say when it does not."""

from dataclasses import dataclass

from rl3d.config.base import Problem
from rl3d.estimate.memory import MemoryPlan
from rl3d.estimate.remedies import remedies
from rl3d.estimate.request import Request
from rl3d.estimate.table import shown


@dataclass(frozen=True)
class Capacity:
    """Bytes that one rank may use, and where that number comes from.

    ``host``: bytes of host memory for one rank, beside the device; None where they are the same or not known.
    """

    bytes: int
    source: str
    host: int | None = None


def problem(request: Request, capacity: Capacity, plan: MemoryPlan | None = None) -> Problem | None:
    """Why the run cannot start on such a device, with the changes that would make it fit; None when it fits."""
    plan = plan or request.plan()
    host = sum(plan.host.values())
    if capacity.host is not None and host > capacity.host:
        text = (
            f"each rank keeps {shown(host)} in host memory ({_largest(dict(plan.host))}), and {shown(capacity.host)} "
            f"are available for it; put fewer ranks on a node, or keep less there (layout.offload, "
            f"algorithm.reference_residency, algorithm.critic_residency)"
        )
        return Problem("memory", text)
    if plan.needed <= capacity.bytes:
        return None
    peak = plan.peak_phase
    beside = f" and {shown(plan.outside)} outside torch" if plan.outside else ""
    text = (
        f"each rank needs {shown(plan.needed)} (in the phase {peak.name!r}: {_largest(dict(peak.items))}{beside}), and "
        f"{capacity.source} gives it {shown(capacity.bytes)}"
    )
    found = remedies(request, capacity.bytes)
    if found:
        text += "; " + ("any of these would make it fit: " if len(found) > 1 else "this would make it fit: ")
        text += "; ".join(str(remedy) for remedy in found)
    else:
        text += "; no setting makes it fit, so take more ranks, larger devices or a smaller model"
    return Problem("memory", text + " (trainer.memory_check=warn starts it all the same)")


def _largest(items: dict[str, int], count: int = 4) -> str:
    top = sorted(items.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {shown(size)}" for name, size in top)
