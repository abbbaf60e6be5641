"""A memory plan as text."""

from typing import Any

from rl3d.estimate.memory import MemoryPlan

GB = 1e9
MB = 1e6


def shown(size: float) -> str:
    """Bytes as a person reads them: 12.3 GB, or 45.6 MB."""
    return f"{size / GB:.1f} GB" if size >= 0.1 * GB else f"{size / MB:.1f} MB"


def summary(plan: MemoryPlan) -> str:
    """One line: the peak, when, and what makes most of it."""
    peak = plan.peak_phase
    top = sorted(peak.items.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {shown(size)}" for name, size in top)
    return f"memory of each rank: {shown(plan.peak)} at most, in the phase {peak.name!r} ({parts})"


def table(plan: MemoryPlan) -> Any:
    """A :class:`rich.table.Table`: items down, phases across; GB are 10^9 bytes, of the rank that needs most then."""
    from rich.table import Table
    from rich.text import Text

    unit, name = (GB, "GB") if plan.peak >= GB else (MB, "MB")
    out = Table(f"{name} for each rank", box=None, pad_edge=False)
    for phase in plan.phases:
        out.add_column(Text(phase.name), justify="right")
    items = list(dict.fromkeys(item for phase in plan.phases for item in phase.items))
    for item in items:
        sizes = [phase.items.get(item, 0) for phase in plan.phases]
        out.add_row(item, *(f"{size / unit:.2f}" if size else "" for size in sizes))
    totals = [f"{phase.bytes / unit:.2f}" for phase in plan.phases]
    out.add_row("allocated", *(Text(t, style="bold" if p is plan.peak_phase else "") for t, p in zip(totals, plan.phases)))
    return out
