"""What a switch did, on one rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl3d.reshard.executor import MoveReport
from rl3d.reshard.spans import Span, totals


@dataclass
class SwitchReport:
    """One switch on one rank: seconds by stage and bytes by kind. A switch that had nothing to do is all zeros.

    Attributes:
        seconds: by stage: ``side`` (a new set of generating ranks), ``park`` (state leaves the device), ``plan`` (checks
            before the move), ``move``, ``gather`` (of weights that a step left in their partitions), ``verify``, ``cache``
            (made or freed), ``unpark``.
        move_seconds: of the move, by kind: ``local`` copies, ``stage`` (into and out of staging memory), ``copy`` between
            ranks, ``wait`` for other ranks.
        received_by_link: payload bytes from ranks ``inside`` the node and ``between`` nodes.
        inside: how those inside came: out of ``memory`` of the own device, of a ``peer``'s GPU, or in ``messages``.
        peer_gb_per_s: what one copy from a peer's GPU reaches, once it was measured.
        allocated, freed: bytes on the device by what they were for: ``KV cache``, ``training copy``, ``gradients``,
            ``optimizer state``, ``generation weights``.
        source: what was moved: ``weights``, or ``partitions`` where the gather after the last step was left out; in
            ``to_training`` what the training copy was made whole from: ``generation copy``, ``partitions``, or nothing.
        gathered_bytes: received by this rank when partitions were gathered.
        arena_bytes, alias_bytes: generation weights in memory of their own, and in that of the training weights.
        host_bytes: buffers in host memory that hold parked state now.
        host_copied: bytes copied to the host; less than was parked where a copy there was still good.
        graph_bytes: on the device, kept for captured decode steps, which outlive the cache's memory.
        verified: parameters whose fingerprints were compared.
        spans: every stage with its start, for a trace.
    """

    direction: str
    seconds: dict[str, float] = field(default_factory=dict)
    move_seconds: dict[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    received_by_link: dict[str, int] = field(default_factory=dict)
    inside: str = ""
    peer_gb_per_s: float | None = None
    staging_bytes: int = 0
    cache_bytes: int = 0
    allocated: dict[str, int] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    transport: str = ""
    source: str = ""
    gathered_bytes: int = 0
    arena_bytes: int = 0
    alias_bytes: int = 0
    host_bytes: int = 0
    host_copied: int = 0
    graph_bytes: int = 0
    verified: int = 0
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as a stage of the switch."""
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self.spans.append(Span(name, start, took))

    def add_move(self, moved: MoveReport) -> None:
        """Take over what the executor measured."""
        self.seconds |= totals(moved.spans)
        self.move_seconds = totals(moved.spans, depth=1)
        self.spans += moved.spans
        self.received_by_link = moved.received_by_link
        self.inside, self.peer_gb_per_s = moved.inside, moved.peer_gb_per_s
        self.bytes_local, self.bytes_sent = moved.bytes_local, moved.bytes_sent
        self.bytes_received, self.staging_bytes = moved.bytes_received, moved.staging_bytes
        self.transport = moved.transport
