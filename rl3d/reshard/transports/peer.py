"""Ranks of one host read each other's memory: no staging, no work for the sender, every box straight into its place."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rl3d.kernels import CopyTable
from rl3d.reshard.plan import ReshardError
from rl3d.reshard.program import Bucket, Message, Program, Pull, strided
from rl3d.reshard.spans import Timeline
from rl3d.reshard.transports.base import control_device
from rl3d.reshard.transports.collective import CollectiveTransport
from rl3d.reshard.transports.memory import Export, attach, export, gpu_of, host_name, read_rate

_log = logging.getLogger(__name__)
_PROBE = 64
_rates: dict[torch.device, float] = {}
"""GB/s at which a GPU reads memory of its peers, once it was measured."""


class PeerTransport:
    """Pulls boxes out of the memory of the ranks of this host; messages carry the rest.

    Each rank maps the tensors that it reads once, when a program is bound (CUDA IPC on a GPU, shared memory on the CPU:
    there the source tensors move into it once), and copies all of them by one table. A move waits for all ranks twice:
    sources are final before the first copy, and may change after the last. Which ranks can map each other is tried out,
    for each pair, when the transport is made, and again for the very memory when it is mapped.

    Args:
        group: a group of all ranks of the plan; ``None`` is the default group.
        device: where the tensors live.
        rank: global rank of this process.
        nodes: node of each global rank, where it is known; memory is not read across nodes.
        required: raise when ranks of one host cannot map each other; otherwise messages are used between them, and one
            line says so.

    Raises:
        ReshardError: on every rank, with ``required``.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None",
        device: torch.device,
        rank: int,
        *,
        nodes: Sequence[int] | None = None,
        required: bool = False,
    ) -> None:
        self.group, self.device, self.rank, self.required = group, device, rank, required
        self.name, self.staging_bytes = "peer", 0
        self._control = control_device(group, device)
        self._messages: CollectiveTransport | None = None
        self._near: set[int] = set()  # ranks of this host
        self._maps, failures = self._probe(None if nodes is None else nodes[rank])
        self._fall_back(failures)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._early = self._late = CopyTable([], device)
        self._rest: Program | None = None
        self._relays = False
        self.inside, self.measures_link = "memory", False
        self._far: torch.Tensor | None = None  # mapped memory of another GPU

    @property
    def peer_gb_per_s(self) -> float | None:
        """GB/s of one contiguous copy from a peer's GPU; measured in the first move with ``measures_link``."""
        return _rates.get(self.device)

    # ---- who can read whom

    def _probe(self, node: int | None) -> tuple[dict[int, set[int]], list[str]]:
        """Rank -> ranks whose memory it can map (itself among them), and what is wrong inside hosts, in words."""
        sample = torch.full((_PROBE,), self.rank % 251, dtype=torch.uint8, device=self.device)
        self._synchronize()
        offer: Export | str = ""
        if self._distributed() and dist.get_world_size(self.group) > 1:
            # torch warns when a process ends whose offer nobody took
            try:
                offer = export(sample.untyped_storage())
            except (RuntimeError, OSError) as error:
                offer = _first_line(error)
        host = (host_name(), node)
        reached, failures = {self.rank}, []
        for peer, (where, offered) in self._gather((host, offer)).items():
            if peer == self.rank or where != host:
                continue
            self._near.add(peer)
            reason = offered if isinstance(offered, str) else _try(offered, peer % 251, self.device)
            if reason:
                failures.append(f"rank {self.rank} cannot map memory of rank {peer}: {reason}")
            else:
                reached.add(peer)
        answers = self._gather((reached, failures))  # no sample goes away before all have read it
        lines = [line for _, failed in answers.values() for line in failed]
        return {peer: reached for peer, (reached, _) in answers.items()}, lines

    def _fall_back(self, failures: list[str]) -> None:
        """Messages for the pairs that cannot map each other; the same on all ranks, which know the same failures."""
        if failures:
            more = f" ({len(failures)} such failures in all)" if len(failures) > 1 else ""
            line = f"{failures[0]}{more}. To read memory directly, {_remedy(failures, self.device)}"
            if self.required:
                raise ReshardError(line)
            if self.rank == min(self._maps):
                _log.warning("%s; these ranks exchange messages instead", line)
        if self._messages is None and any(self._maps.keys() - reached for reached in self._maps.values()):
            self._messages = CollectiveTransport(self.group, self.device)
            self.name = "peer+collective"

    # ---- the protocol

    def prepare(self, program: Program) -> None:
        """Offer what peers read, map what this rank reads. Collective.

        Memory that cannot be shared or mapped after all travels in messages from here on; with ``required`` it is a
        :class:`ReshardError` on every rank.
        """
        problem, offers = "", {}
        try:
            offers = _offers(program)
        except (RuntimeError, OSError) as error:
            problem = f"rank {self.rank} cannot share its weights: {_first_line(error)}"
        everyone = self._gather((problem, offers))
        failures = [problem for problem, _ in everyone.values() if problem]
        for peer in (peer for peer, (problem, _) in everyone.items() if problem):
            for reader, reached in self._maps.items():
                if reader != peer:
                    reached.discard(peer)
        mapped: dict[int, torch.Tensor] = {}
        broken: dict[int, str] = {}
        early: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        late: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for pull in program.pulls:
            if pull.peer in self._maps[self.rank] and pull.peer not in broken:
                try:
                    source = _source(pull, everyone[pull.peer][1], mapped, self.device)
                except (RuntimeError, OSError) as error:
                    broken[pull.peer] = f"rank {self.rank} cannot map memory of rank {pull.peer}: {_first_line(error)}"
                    continue
                (late if pull.relay else early).append((pull.peer, pull.target, source))
        for reader, found in self._gather(broken).items():
            failures += found.values()
            self._maps[reader] -= found.keys()
        self._fall_back(failures)
        self._early, self._late = (
            CopyTable([(target, source) for peer, target, source in copies if peer not in broken], self.device)
            for copies in (early, late)
        )
        self._look_at_links(program, everyone, mapped)
        self._relays = program.relays
        self._rest = self._without_pulls(program)
        if self._rest is not None and self._messages is not None:
            self._messages.prepare(self._rest)
            self.staging_bytes = self._messages.staging_bytes

    def _look_at_links(self, program: Program, everyone: Mapping[int, tuple[str, Any]],
                       mapped: Mapping[int, torch.Tensor]) -> None:  # fmt: skip
        """How what this rank reads gets here, and which memory to measure the link by."""
        mine, far = gpu_of(self.device), [torch.empty(0, dtype=torch.uint8)]
        for exported in (offer[0] for peer in self._maps[self.rank] for offer in everyone[peer][1].values()):
            if exported.gpu != mine and id(exported) in mapped:
                far.append(mapped[id(exported)])
        largest = max(far, key=len)
        self._far = largest if len(largest) else None
        self.inside = "memory" if self._far is None else "peer"
        if any(pull.peer in self._near - self._maps[self.rank] for pull in program.pulls):
            self.inside = "messages"  # in part, and the slower one

    def _measure_link(self) -> str:
        """As long as the peers keep their memory: before all agree that the move is done."""
        try:
            if self.measures_link and self._far is not None and self.device not in _rates:
                _rates[self.device] = read_rate(self._far, self.device)
        except RuntimeError as error:
            return f"rank {self.rank}: {_first_line(error)}"
        return ""

    def move(self, program: Program, timeline: Timeline) -> None:
        problem = self._copy(self._early, timeline)
        if self._messages is not None and self._rest is not None:
            self._agree(problem, timeline)
            self._messages.move(self._rest, timeline)
        if self._relays:
            self._agree(problem, timeline)
            problem = self._copy(self._late, timeline)
        self._agree(problem or self._measure_link(), timeline)

    @torch.no_grad()
    def _copy(self, copies: CopyTable, timeline: Timeline) -> str:
        """Carry out copies and wait for them; what went wrong, in words."""
        try:
            if self._stream is None:
                with timeline.span("copy"):
                    copies.run()
                return ""
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), timeline.span("copy"):
                copies.run()
            self._stream.synchronize()
        except RuntimeError as error:
            return f"rank {self.rank}: {_first_line(error)}"
        return ""

    def _without_pulls(self, program: Program) -> Program | None:
        """The messages that remain; ``None`` in a host of its own."""
        if self._messages is None:
            return None
        buckets = []
        for bucket in program.buckets:
            sends = [m for m in bucket.sends if self.rank not in self._maps[m.peer]]
            receives = [m for m in bucket.receives if m.peer not in self._maps[self.rank]]
            if sends or receives:
                buckets.append(Bucket(bucket.index, sends, receives))
        return replace(program, buckets=buckets, send_staging=_end(b.sends for b in buckets),
                       receive_staging=_end(b.receives for b in buckets))  # fmt: skip

    # ---- agreement

    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _gather(self, value: Any) -> dict[int, Any]:
        """Global rank -> what it gave."""
        if not self._distributed():
            return {self.rank: value}
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return dict(zip(dist.get_process_group_ranks(self.group), found, strict=True))

    def _agree(self, problem: str, timeline: Timeline) -> None:
        """Wait for all ranks; raise on all when one has a problem."""
        if not self._distributed():
            self._raise([problem] if problem else [])
            return
        failed = torch.tensor([int(bool(problem))], dtype=torch.int64, device=self._control)
        with timeline.span("wait"):
            dist.all_reduce(failed, group=self.group)
            anywhere = failed.item()
        if anywhere:
            self._raise([line for line in self._gather(problem).values() if line])

    def _raise(self, problems: list[str]) -> None:
        if problems:
            raise ReshardError("cannot move weights: " + "; ".join(problems[:8]))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _offers(program: Program) -> dict[tuple[bool, str], tuple[Export, int, torch.dtype]]:
    """(relay, name) -> storage, position of the tensor's first element in it, and its dtype."""
    shared: dict[int, Export] = {}
    found = {}
    for relay, name in sorted(program.exports):
        tensor = (program.dst if relay else program.src)[name]
        storage = tensor.untyped_storage()
        if storage._cdata not in shared:
            shared[storage._cdata] = export(storage)
        found[relay, name] = (shared[storage._cdata], int(tensor.storage_offset()), tensor.dtype)
    return found


def _source(
    pull: Pull, offers: Mapping[tuple[bool, str], tuple[Export, int, torch.dtype]], mapped: dict[int, torch.Tensor],
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    exported, start, dtype = offers[pull.relay, pull.name]
    if id(exported) not in mapped:  # one object for each storage of a peer
        mapped[id(exported)] = attach(exported, device)
    whole = mapped[id(exported)]
    flat = whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return strided(flat, start + pull.offset, pull.pitch, *pull.target.shape)


def _try(exported: Export, expected: int, device: torch.device) -> str:
    try:
        found = attach(exported, device).cpu()
    except (RuntimeError, OSError) as error:
        return _first_line(error)
    return "" if bool((found == expected).all()) else f"found other contents than it wrote ({found[:4].tolist()})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _remedy(failures: Sequence[str], device: torch.device) -> str:
    """What to change so that memory can be mapped."""
    if any("No space left" in line or "unable to allocate shared memory" in line for line in failures):
        return "make /dev/shm larger than the training weights (docker run --shm-size=64g, or --ipc=host)"
    if device.type != "cuda":
        return "run the ranks as one user in one container, or in containers with --pid=host"
    if any("on another one" in line for line in failures):
        return ("show each rank all GPUs of its host: no CUDA_VISIBLE_DEVICES and no --gpus-per-task, which hide them "
                "(srun --gpus-per-node=N shows all)")  # fmt: skip
    return ("run the ranks in one container, or in containers with --ipc=host and --pid=host; under MPS, all of them as "
            "clients of one server, and not in MIG slices")  # fmt: skip


def _end(groups: Iterable[list[Message]]) -> int:
    return max((m.start + m.nbytes for messages in groups for m in messages), default=0)
