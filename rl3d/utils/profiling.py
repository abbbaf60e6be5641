"""Where the time and the bytes of a switch go, over all switches of this process since profiling was enabled."""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TextIO

MOVE_STAGES = ("local", "stage", "copy", "wait")


class Switch(Protocol):
    """What is recorded of a switch; :class:`rl3d.engine.hybrid.SwitchReport` describes each field."""

    direction: str
    seconds: dict[str, float]
    move_seconds: dict[str, float]
    received_by_link: dict[str, int]
    inside: str
    peer_gb_per_s: float | None
    bytes_local: int
    bytes_sent: int
    bytes_received: int
    staging_bytes: int
    allocated: dict[str, int]
    freed: dict[str, int]
    transport: str
    source: str
    gathered_bytes: int
    arena_bytes: int
    alias_bytes: int
    host_bytes: int
    host_copied: int
    graph_bytes: int
    verified: int
    spans: list[Any]  # of rl3d.reshard.spans.Span


class Links(Protocol):
    """What a cluster's links carry, as in :class:`rl3d.estimate.topology.Topology`."""

    @property
    def inside_gb_per_s(self) -> float: ...

    @property
    def between_gb_per_s(self) -> float: ...


_enabled = False
_links: dict[str, float] = {}
_records: list[Switch] = []
_place: tuple[int, str] = (0, "cpu")


def enable_switch_profiling(
    enabled: bool = True, *, inside_gb_per_s: float | None = None, between_gb_per_s: float | None = None,
    topology: Links | None = None,
) -> None:  # fmt: skip
    """Start recording every switch of every actor in this process, from an empty record; ``False`` stops.

    Args:
        inside_gb_per_s, between_gb_per_s: what the links between GPUs of a node, and between nodes, carry for a GPU in one
            direction, in 1e9 bytes per second. What was achieved is then compared with them.
        topology: has both, for those that are not given (``Topology.read("h200-8")``).

    Without a rate inside the node, what comes out of another GPU's memory is compared with one copy of 64 MiB from there,
    which the first switch makes beside its own; what comes out of the own device's (or, on a CPU, the host's) with one plain
    copy there, made for the report; and messages with nothing: their link's rate is unknown.
    """
    global _enabled
    _enabled = enabled
    if enabled:
        _records.clear()
        given = {"inside": inside_gb_per_s, "between": between_gb_per_s}
        if topology is not None:
            known = {"inside": topology.inside_gb_per_s, "between": topology.between_gb_per_s}
            given = {link: known[link] if rate is None else rate for link, rate in given.items()}
        _links.clear()
        _links.update({link: rate for link, rate in given.items() if rate is not None})


def switches_are_profiled() -> bool:
    """Whether this process records its switches."""
    return _enabled


def record_switch(report: Switch, rank: int, device: object) -> None:
    """Called by the hybrid engine after each switch of this rank."""
    global _place
    if _enabled:
        _records.append(report)
        _place = (rank, str(device))


def switch_report() -> dict[str, Any]:
    """What was recorded: direction -> figures of this rank; empty when nothing was.

    ``count``; ``seconds``: stage -> mean, min, max, where stages are ``plan`` (checks), ``move`` with its parts
    ``move/local``, ``move/stage``, ``move/copy``, ``move/wait``, ``verify``, ``cache`` (the KV cache made or freed) and
    ``total``; ``bytes``: means of ``received``, ``sent``, ``local``, ``inside`` and ``between`` (received over each link),
    of ``gathered`` (of partitions, after the move) and ``host_copied`` (parked), and the largest ``staging``, ``arena``
    (generation weights in memory of their own), ``alias`` (in that of the training weights), ``host`` (parked state) and
    ``graphs`` (kept for captured decode steps);
    ``allocated`` and ``freed``: means by what it was for; ``source``: what was moved, or made whole again; ``verified``:
    the mean number of parameters whose fingerprints were compared; ``transport``;
    ``gb_per_s``: received bytes over the seconds of ``move/copy``, which include waiting for senders of messages;
    ``link_gb_per_s``: link -> what it carries, where known; ``inside``: how bytes came from ranks of the node, out of
    ``memory`` of the own device, of a ``peer``'s GPU or in ``messages``; ``link_ratio``: the seconds that the links would
    need over those of ``move/copy``, ``None`` when a link's rate is not known or nothing was received.
    """
    out: dict[str, Any] = {}
    for direction in dict.fromkeys(r.direction for r in _records):
        records = [r for r in _records if r.direction == direction]
        copying = sum(r.move_seconds.get("copy", 0.0) for r in records)
        received = sum(r.bytes_received for r in records)
        by_link = {link: sum(r.received_by_link.get(link, 0) for r in records) for link in ("inside", "between")}
        rates = dict(_links)
        if by_link["inside"] and "inside" not in rates and (rate := _inside_rate(records)) is not None:
            rates["inside"] = rate
        least = max((by_link[link] / rates[link] / 1e9 for link in rates), default=0.0)
        known = all(link in rates for link, nbytes in by_link.items() if nbytes)
        out[direction] = {
            "count": len(records),
            "seconds": _seconds(records),
            "bytes": {
                "received": received / len(records), **{link: nbytes / len(records) for link, nbytes in by_link.items()},
                "sent": _mean(r.bytes_sent for r in records), "local": _mean(r.bytes_local for r in records),
                "gathered": _mean(r.gathered_bytes for r in records),
                "host_copied": _mean(r.host_copied for r in records),
                "staging": max(r.staging_bytes for r in records), "arena": max(r.arena_bytes for r in records),
                "alias": max(r.alias_bytes for r in records), "host": max(r.host_bytes for r in records),
                "graphs": max(r.graph_bytes for r in records),
            },
            "source": ", ".join(dict.fromkeys(r.source for r in records if r.source)),
            "verified": _mean(r.verified for r in records),
            "allocated": _means([r.allocated for r in records]), "freed": _means([r.freed for r in records]),
            "transport": ", ".join(dict.fromkeys(r.transport for r in records if r.transport)),
            "gb_per_s": received / copying / 1e9 if copying else 0.0,
            "link_gb_per_s": rates, "inside": _ways(records),
            "link_ratio": least / copying if copying and received and known else None,
        }  # fmt: skip
    return out


def print_switch_report(file: TextIO | None = None) -> None:
    """Print a table for each direction: milliseconds by stage, bytes by link, memory; on this rank."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file or sys.stdout, highlight=False)
    report = switch_report()
    if not report:
        console.print("no switch was recorded; call rl3d.utils.enable_switch_profiling() first")
    for direction, found in report.items():
        by = f" of {found['source']}" if found["source"] else ""
        by += f" by {found['transport']}" if found["transport"] else ""
        title = f"{direction}: {found['count']} switches{by}, rank {_place[0]}"
        table = Table(title=title, title_justify="left", title_style="bold")
        for heading in ("", "mean", "(min, max)"):
            table.add_column(heading, justify="left" if not heading else "right")
        for stage, s in found["seconds"].items():
            low, high = (f"{1e3 * s[key]:.2f}" for key in ("min", "max"))
            table.add_row(_label(stage), f"{1e3 * s['mean']:.2f} ms", f"({low}, {high})")
        for line in _byte_lines(found):
            table.add_row(*line)
        console.print(table)


def save_switch_trace(path: str | Path) -> Path:
    """Write this rank's switches as a Chrome trace (chrome://tracing, ui.perfetto.dev); returns the path.

    ``{rank}`` in the path becomes the rank. Traces of the ranks of a host have one clock. One event for each switch, inside
    it its stages, inside those their parts; ``ts`` and ``dur`` are in microseconds.
    """
    rank, device = _place
    wall = time.time() - time.perf_counter()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} ({device})"}}
    ]
    for record in _records:
        if not record.spans:
            continue
        start = min(span.start for span in record.spans)
        end = max(span.start + span.seconds for span in record.spans)
        details = {"received": record.bytes_received, "sent": record.bytes_sent, "local": record.bytes_local,
                   "staging": record.staging_bytes, "transport": record.transport, **record.received_by_link,
                   **{f"allocated {k}": v for k, v in record.allocated.items()},
                   **{f"freed {k}": v for k, v in record.freed.items()}}  # fmt: skip
        events.append(_event(f"switch {record.direction}", wall + start, end - start, rank, details))
        events += [_event(span.name, wall + span.start, span.seconds, rank, {}) for span in record.spans]
    place = Path(str(path).replace("{rank}", str(rank)))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return place


def _ways(records: list[Switch]) -> str:
    """How bytes came from ranks of the node, for all ways that occur."""
    return ", ".join(dict.fromkeys(r.inside for r in records if r.received_by_link.get("inside")))


def _inside_rate(records: list[Switch]) -> float | None:
    """GB/s to compare with where none was given; None: unknown."""
    if _ways(records) == "memory":
        return plain_copy_rate(_place[1])
    if _ways(records) == "peer":
        return next((r.peer_gb_per_s for r in reversed(records) if r.peer_gb_per_s is not None), None)
    return None


@cache
def plain_copy_rate(device: str) -> float:
    """GB/s of payload (1e9 bytes) of the fastest of a few copies of 64 MiB from one piece of memory to another."""
    import torch

    source = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        if device.startswith("cuda"):
            torch.cuda.current_stream(device).synchronize()
        best = min(best, time.perf_counter() - start)
    return source.numel() / best / 1e9


def _event(name: str, start: float, seconds: float, rank: int, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": "switch", "name": name, "pid": rank, "tid": 0, "ts": 1e6 * start, "dur": 1e6 * seconds,
            "args": dict(details)}  # fmt: skip


def _seconds(records: list[Switch]) -> dict[str, dict[str, float]]:
    rows = []
    for r in records:
        row = {}
        for stage, value in r.seconds.items():
            row[stage] = value
            if stage == "move":
                row |= {f"move/{part}": r.move_seconds[part] for part in MOVE_STAGES if part in r.move_seconds}
        rows.append({**row, "total": sum(r.seconds.values())})
    found = {}
    for stage in dict.fromkeys(stage for row in rows for stage in row):
        values = [row[stage] for row in rows if stage in row]
        found[stage] = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return found


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _means(sizes: list[dict[str, int]]) -> dict[str, float]:
    return {name: _mean(s.get(name, 0) for s in sizes) for name in dict.fromkeys(n for s in sizes for n in s)}


def _label(stage: str) -> str:
    part = stage.partition("/")[2]
    return f"  {part}" if part else {"cache": "KV cache"}.get(stage, stage)


def _byte_lines(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    sizes, rates = found["bytes"], found["link_gb_per_s"]
    where = {"inside": "inside the node", "between": "between nodes"}
    copied = "copy from a peer" if found["inside"] == "peer" else "plain copy"
    against = {link: "link" if link in _links else copied for link in where}
    lines = []
    for link in where:
        if sizes[link]:
            rate = f"{rates[link]:.1f} GB/s {against[link]}" if link in rates else "link's rate unknown"
            lines.append((f"received {where[link]}", _size(sizes[link]), rate))
    if found["gb_per_s"] and sizes["received"]:
        ratio = "" if found["link_ratio"] is None else f"{found['link_ratio']:.2f} of the rate"
        lines.append(("achieved", f"{found['gb_per_s']:.2f} GB/s", ratio))
    labels = {
        "sent": "sent", "local": "copied in place", "gathered": "gathered from partitions", "staging": "staging, most",
        "arena": "generation weights of their own", "alias": "generation weights that are training weights",
        "host": "parked in host memory, most", "host_copied": "copied to the host",
        "graphs": "kept for captured decode steps",
    }  # fmt: skip
    lines += [(label, _size(sizes[key]), "") for key, label in labels.items() if sizes[key]]
    if found["verified"]:
        lines.append(("parameters verified", f"{found['verified']:.0f}", ""))
    for kind in ("allocated", "freed"):
        lines += [(f"{kind}: {what}", _size(nbytes), "") for what, nbytes in found[kind].items() if nbytes]
    return lines


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"
