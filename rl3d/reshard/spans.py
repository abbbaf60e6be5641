"""Where time goes inside an operation: named, nested spans on the host's clock or a GPU stream's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Span:
    """``name`` ran from ``start`` for ``seconds``, inside ``depth`` other spans.

    ``start`` is in seconds of :func:`time.perf_counter`, which the processes of one Linux host share.
    """

    name: str
    start: float
    seconds: float
    depth: int = 0


class Timeline:
    """Collects spans of one operation, in the order in which they began.

    On a GPU the ends of a span are events in the current stream, so nothing waits for it; :meth:`spans` needs the
    streams to have come to their ends.

    Args:
        device: where the work runs, as text or :class:`torch.device`; the host when left out.
    """

    def __init__(self, device: object = "cpu") -> None:
        self._cuda = str(device).startswith("cuda")
        self._depth = 0
        self._open: list[tuple[str, Any, Any, int]] = []
        self._zero, self._origin = time.perf_counter(), self._now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the block as ``name``."""
        at, depth = len(self._open), self._depth
        start = self._now()
        self._open.append((name, start, start, depth))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._open[at] = (name, start, self._now(), depth)

    def spans(self) -> list[Span]:
        """All spans so far, outer before inner."""
        found = []
        for name, start, end, depth in self._open:
            begin = self._seconds(self._origin, start)
            found.append(Span(name, self._zero + begin, self._seconds(start, end), depth))
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


def totals(spans: list[Span], depth: int = 0) -> dict[str, float]:
    """Seconds of the spans at one depth, added up by name."""
    found: dict[str, float] = {}
    for span in spans:
        if span.depth == depth:
            found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found


def deeper(spans: list[Span]) -> list[Span]:
    """The same spans inside one more."""
    return [replace(span, depth=span.depth + 1) for span in spans]
