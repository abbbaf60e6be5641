"""Carrying out a plan on real tensors: check on all ranks, then move in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rl3d.reshard.plan import Plan, ReshardError
from rl3d.reshard.program import Program, Tensors, bind, find_problems
from rl3d.reshard.spans import Span, Timeline, totals
from rl3d.reshard.transports import CollectiveTransport, PeerTransport, Transport, run_inprocess
from rl3d.reshard.transports.base import control_device


@dataclass(frozen=True)
class MoveReport:
    """What one rank did in one move. Bytes are payload bytes of this rank.

    ``spans`` are ``plan`` (checking tensors, and binding them to the plan where one has moved) and ``move``, inside which
    are ``local`` copies, ``stage`` into and out of staging memory, ``copy`` between ranks and ``wait`` for other ranks.
    ``received_by_link`` splits ``bytes_received`` into ``inside`` the node and ``between`` nodes; ``inside`` says how the
    former came (:class:`~rl3d.reshard.transports.Transport`), ``peer_gb_per_s`` what one copy from a peer's GPU reaches, if
    that is known.
    """

    bytes_local: int
    bytes_sent: int
    bytes_received: int
    staging_bytes: int
    messages: int
    transport: str
    received_by_link: dict[str, int] = field(default_factory=dict)
    inside: str = "messages"
    peer_gb_per_s: float | None = None
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the move, without the checks before it."""
        return totals(self.spans).get("move", 0.0)

    @property
    def gigabytes_per_second(self) -> float:
        """Busier direction over the wire, 1e9 bytes per second."""
        return max(self.bytes_sent, self.bytes_received) / max(self.seconds, 1e-9) / 1e9


class Resharder:
    """Moves one set of weights by one plan, any number of times.

    Construction and :meth:`run` are collective over ``group``. Destination tensors are written in place, so their
    addresses never change. Works in either direction: the plan says which.

    Args:
        plan: the same on every rank; its hash is compared once.
        rank: global rank of this process.
        group: process group over global ranks that contains every rank of the plan; ``None`` is the default group, or
            no group at all in a process without one.
        src, dst: canonical name -> this rank's contiguous local tensor under either layout.
        device: where the tensors and the staging buffers live.
        transport: how boxes travel; :class:`CollectiveTransport` when left out. :class:`PeerTransport` reads the memory
            of the ranks of its host.
        nodes: node of each global rank, for the report; one node when left out.

    Attributes:
        measures_link: the next move copies 64 MiB from a peer's GPU as well, unless this process has done so before, to know
            what its link carries. Each rank may ask for that on its own.

    Raises:
        ReshardError: on every rank and before any weight is sent, when the plans differ or a tensor on any rank is
            missing, unexpected, or has the wrong shape, dtype, device or memory.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: "dist.ProcessGroup | None",
        src: Tensors,
        dst: Tensors,
        device: torch.device | str,
        transport: Transport | None = None,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.plan, self.rank, self.group, self.nodes = plan, rank, group, nodes
        self.src, self.dst = dict(src), dict(dst)
        self.device = torch.device(device)
        self.transport = transport if transport is not None else CollectiveTransport(group, self.device)
        self.measures_link = False
        self._control = control_device(group, self.device)
        self._program: Program | None = None
        self._addresses: tuple[int, ...] = ()
        self._sound: list[tuple[Any, ...]] = []
        self._check_members()
        self._agree_on_plan()
        self._bind()

    def run(self) -> MoveReport:
        """Move the weights. Raises :class:`ReshardError` on every rank when any tensor no longer fits."""
        timeline = Timeline(self.device)
        with timeline.span("plan"):
            self._synchronize()  # peers may read the sources as soon as all ranks have bound
            self._bind()
        assert self._program is not None
        program = self._program
        peers = self.transport if isinstance(self.transport, PeerTransport) else None
        if peers is not None:
            peers.measures_link = self.measures_link
        with timeline.span("move"):
            with timeline.span("local"):
                program.run_local()
            self.transport.move(program, timeline)
        self._synchronize()
        return MoveReport(
            bytes_local=program.bytes_local,
            bytes_sent=program.bytes_sent,
            bytes_received=program.bytes_received,
            staging_bytes=self.transport.staging_bytes,
            messages=sum(len(b.sends) + len(b.receives) for b in program.buckets),
            transport=self.transport.name,
            received_by_link=self._by_link(program),
            inside=self.transport.inside,
            peer_gb_per_s=None if peers is None else peers.peer_gb_per_s,
            spans=timeline.spans(),
        )

    def _by_link(self, program: Program) -> dict[str, int]:
        found = {"inside": 0, "between": 0}
        for pull in program.pulls:
            near = self.nodes is None or self.nodes[pull.peer] == self.nodes[self.rank]
            found["inside" if near else "between"] += pull.target.numel() * pull.target.element_size()
        return found

    def release(self) -> None:
        """Let go of the source tensors; set ``src`` anew before the next :meth:`run`."""
        self.src, self._program, self._addresses, self._sound = {}, None, (), []

    def _bind(self) -> None:
        """Check the tensors, and make new views if one of them moved on any rank. One small collective."""
        state, problems = self._state(), []
        if state != self._sound:  # a full check takes a millisecond for 400 tensors
            problems = find_problems(self.plan, self.rank, self.src, self.dst, self.device)
            self._sound = [] if problems else state
        stale = self._program is None or self._places() != self._addresses
        if self._agree(problems, stale):
            self._program = bind(self.plan, self.rank, self.src, self.dst)
            self.transport.prepare(self._program)
            self._addresses = self._places()  # on the CPU, memory moves once when peers begin to share it

    def _state(self) -> list[tuple[Any, ...]]:
        """All that a check looks at: tensors of which nothing of this changed are as sound as they were."""
        return [
            (name, t.data_ptr(), t.untyped_storage().nbytes(), t.shape, t.stride(), t.dtype, t.device)
            for tensors in (self.src, self.dst)
            for name, t in tensors.items()
        ]

    def _places(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for tensors in (self.src, self.dst) for t in tensors.values())

    def _distributed(self) -> bool:
        return self.group is not None or (dist.is_available() and dist.is_initialized())

    def _check_members(self) -> None:
        needed = sorted({*self.plan.source.ranks, *self.plan.destination.ranks})
        members = dist.get_process_group_ranks(self.group) if self._distributed() else [self.rank]
        outside = [rank for rank in needed if rank not in members]
        if outside:
            raise ReshardError(
                f"the plan {self.plan.source.name} -> {self.plan.destination.name} needs ranks {outside}, which are "
                f"not in the process group {members}; give a group that contains them all"
            )

    def _agree_on_plan(self) -> None:
        if not self._distributed():
            return
        words = [int(self.plan.hash[i : i + 12], 16) for i in range(0, 60, 12)]
        mine = torch.tensor([[self.rank, *words]], dtype=torch.int64, device=self._control)
        everyone = torch.empty(dist.get_world_size(self.group), mine.shape[1], dtype=torch.int64, device=self._control)
        dist.all_gather(list(everyone.split(1)), mine, group=self.group)
        if bool((everyone[:, 1:] != everyone[:1, 1:]).any()):
            hashes = {r: "".join(f"{w:012x}" for w in line)[:12] for r, *line in everyone.tolist()}
            raise ReshardError(
                f"ranks have different plans, by rank: {hashes}; build them from the same specifications and layouts"
            )

    def _agree(self, problems: list[str], stale: bool) -> bool:
        """Raise on every rank when any has problems, so that nobody is left waiting; else whether any is stale."""
        if not self._distributed():
            if problems:
                raise ReshardError("cannot move weights, nothing was written:\n" + "\n".join(problems))
            return stale
        flags = torch.tensor([len(problems), int(stale)], dtype=torch.int64, device=self._control)
        dist.all_reduce(flags, group=self.group)
        count, any_stale = flags.tolist()
        if not count:
            return bool(any_stale)
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(gathered, problems[:20], group=self.group)
        lines = [line for lines in gathered for line in lines]
        raise ReshardError("cannot move weights, nothing was sent:\n" + "\n".join(lines[:40]))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def apply_plan_inprocess(plan: Plan, src_by_rank: Mapping[int, Tensors], dst_by_rank: Mapping[int, Tensors]) -> int:
    """Carry out a plan for all of its ranks in this process; returns the largest staging buffer in bytes.

    Raises :class:`ReshardError` with every problem of every rank before anything is written.
    """
    ranks = sorted({*plan.source.ranks, *plan.destination.ranks})
    inputs = {rank: (src_by_rank.get(rank, {}), dst_by_rank.get(rank, {})) for rank in ranks}
    problems = [line for rank, (src, dst) in inputs.items() for line in find_problems(plan, rank, src, dst)]
    if problems:
        raise ReshardError("cannot move weights, nothing was written:\n" + "\n".join(problems))
    programs = [bind(plan, rank, src, dst) for rank, (src, dst) in inputs.items()]
    devices = [t.device for pair in inputs.values() for tensors in pair for t in tensors.values()]
    return run_inprocess(programs, devices[0] if devices else None)
