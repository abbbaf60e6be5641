"""Where the time of a switch goes: seconds by stage for each direction, over all switches since profiling was enabled."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TextIO

_enabled = False
_seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
_bytes: dict[str, list[int]] = defaultdict(list)


def enable_switch_profiling(enabled: bool = True) -> None:
    """Start recording every switch of every actor in this process, from an empty record; ``False`` stops."""
    global _enabled
    _enabled = enabled
    if enabled:
        _seconds.clear()
        _bytes.clear()


def record_switch(direction: str, seconds: Mapping[str, float], received: int) -> None:
    """Called by the hybrid engine after each switch: seconds by stage, and bytes that this rank received."""
    if _enabled:
        for stage, value in {**seconds, "total": sum(seconds.values())}.items():
            _seconds[direction][stage].append(value)
        _bytes[direction].append(received)


def switch_report() -> dict[str, Any]:
    """What was recorded: direction -> stage -> mean, min, max (seconds) and count, and ``received`` in bytes.

    Stages: ``move`` the weights, ``verify`` fingerprints, ``cache`` make or free the KV cache, ``total``.
    """
    out: dict[str, Any] = {}
    for direction, stages in _seconds.items():
        out[direction] = {
            stage: {"mean": sum(v) / len(v), "min": min(v), "max": max(v), "count": len(v)} for stage, v in stages.items()
        }
        out[direction]["received"] = sum(_bytes[direction]) / len(_bytes[direction])
    return out


def print_switch_report(file: TextIO | None = None) -> None:
    """Print one line for each direction and stage: mean (min, max) in milliseconds, on this rank."""
    file = file or sys.stdout
    report = switch_report()
    if not report:
        print("no switch was recorded; call rl3d.utils.enable_switch_profiling() first", file=file)
    for direction, stages in report.items():
        received = stages.pop("received")
        print(f"{direction}: {stages['total']['count']} switches, {received / 1e6:.1f} MB received by this rank", file=file)
        for stage, s in stages.items():
            label = "KV cache" if stage == "cache" else stage
            print(f"  {label:<9} {s['mean'] * 1e3:9.2f} ms  ({s['min'] * 1e3:.2f}, {s['max'] * 1e3:.2f})", file=file)
