"""One rank's part of a plan, bound to its tensors: what to copy, what to pack, what to unpack.

The only place that turns rows of a plan into strided views; every transport goes through it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rl3d.kernels import CopyTable
from rl3d.reshard.plan import FILL, Plan, Rows
from rl3d.reshard.schedule import ALIGN

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Message:
    """All boxes that one peer exchanges with this rank in one bucket, packed back to back.

    ``start`` is the byte position in staging memory; ``parts`` pairs each strided view of a local tensor with its byte
    position inside the message.
    """

    peer: int
    start: int
    nbytes: int = 0
    parts: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def buffer(self, staging: torch.Tensor) -> torch.Tensor:
        """This message's bytes: a flat uint8 view of ``staging``."""
        return staging[self.start : self.start + self.nbytes]

    def slots(self, staging: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each local box beside its place in the message."""
        buffer = self.buffer(staging)
        return [
            (view, buffer[at : at + view.numel() * view.element_size()].view(view.dtype).view(view.shape))
            for view, at in self.parts
        ]


@dataclass
class Bucket:
    """What one rank sends and receives at a time; staging memory is reused from bucket to bucket."""

    index: int
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Pull:
    """A box that this rank receives, and where it lies at ``peer``: for transports that read the peer's memory.

    ``relay`` boxes lie in the peer's destination tensor, where another box of the plan has brought them.
    """

    peer: int
    name: str
    relay: bool
    offset: int
    pitch: int
    target: torch.Tensor


@dataclass
class Program:
    """A rank's work, in order: local copies and fills, then the buckets.

    ``pulls`` are the boxes of all receives once more; ``exports`` are (relay, name) of the tensors that peers read, out
    of ``src`` or, with relay, ``dst``. ``relays`` says whether any rank of the plan hands on what it received.
    """

    rank: int
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    fills: list[torch.Tensor]
    buckets: list[Bucket]
    send_staging: int
    receive_staging: int
    bytes_local: int
    bytes_sent: int
    bytes_received: int
    pulls: list[Pull] = field(default_factory=list)
    exports: set[tuple[bool, str]] = field(default_factory=set)
    relays: bool = False
    src: Tensors = field(default_factory=dict)
    dst: Tensors = field(default_factory=dict)
    _local: CopyTable | None = field(default=None, repr=False)

    @torch.no_grad()
    def run_local(self) -> None:
        """Copies inside the rank (none where source and destination are the same memory) and zeros for padding."""
        if self.copies and self._local is None:
            self._local = CopyTable(self.copies, self.copies[0][0].device)
        if self._local is not None:
            self._local.run()
        for pad in self.fills:
            pad.zero_()


def strided(tensor: torch.Tensor, offset: int, pitch: int, rows: int, cols: int) -> torch.Tensor:
    """The ``(rows, cols)`` box of a contiguous tensor at a flat element offset with a row pitch."""
    tensor = tensor.detach()
    return tensor.as_strided((rows, cols), (pitch, 1), tensor.storage_offset() + offset)


def bind(plan: Plan, rank: int, src: Tensors, dst: Tensors) -> Program:
    """Bind the rows of ``rank`` to its tensors. The tensors must have passed :func:`find_problems`."""
    rows = plan.rows_of(rank)
    program = Program(
        rank, [], [], [], 0, 0,
        bytes_local=_total(rows, rows.src == rows.dst),
        bytes_sent=_total(rows, rows.moved & (rows.src == rank)),
        bytes_received=_total(rows, rows.moved & (rows.dst == rank)),
        relays=bool(plan.segments.relay.any()), src=src, dst=dst,
    )  # fmt: skip
    bucket: Bucket | None = None
    columns = [getattr(rows, name).tolist() for name in rows.__dataclass_fields__]
    for param, sender, receiver, _, _, n, m, s_off, s_pitch, d_off, d_pitch, nbytes, index, relay in zip(*columns):
        name = plan.names[param]
        if sender == FILL:
            program.fills.append(strided(dst[name], d_off, d_pitch, n, m))
            continue
        if sender == receiver:
            source, target = strided(src[name], s_off, s_pitch, n, m), strided(dst[name], d_off, d_pitch, n, m)
            if source.data_ptr() != target.data_ptr():
                program.copies.append((target, source))
            continue
        if bucket is None or bucket.index != index:
            bucket = Bucket(index)
            program.buckets.append(bucket)
        if sender == rank:
            held = dst if relay else src  # what is handed on arrived in the destination in an earlier bucket
            _append(bucket.sends, receiver, strided(held[name], s_off, s_pitch, n, m), nbytes)
            program.exports.add((relay, name))
        else:
            target = strided(dst[name], d_off, d_pitch, n, m)
            _append(bucket.receives, sender, target, nbytes)
            program.pulls.append(Pull(sender, name, relay, s_off, s_pitch, target))
    program.send_staging = max((_end(b.sends) for b in program.buckets), default=0)
    program.receive_staging = max((_end(b.receives) for b in program.buckets), default=0)
    return program


def _total(rows: Rows, mask: np.ndarray) -> int:
    return int(rows.nbytes[mask].sum())


def _end(messages: list[Message]) -> int:
    return -(-(messages[-1].start + messages[-1].nbytes) // ALIGN) * ALIGN if messages else 0


def _append(messages: list[Message], peer: int, view: torch.Tensor, nbytes: int) -> None:
    """Rows come sorted by peer, so a message is complete when the next peer appears."""
    if not messages or messages[-1].peer != peer:
        messages.append(Message(peer, _end(messages)))
    message = messages[-1]
    message.parts.append((view, message.nbytes))
    message.nbytes += nbytes


def find_problems(plan: Plan, rank: int, src: Tensors, dst: Tensors, device: torch.device | None = None) -> list[str]:
    """Everything that keeps these tensors from being moved by the plan, in words; empty when all is well.

    Each line names rank, side, parameter, what was expected and what was found. Nothing is sent or written.
    """
    problems: list[str] = []
    spans: list[tuple[int, int, str, str]] = []
    for label, side, tensors in (("source", plan.source, src), ("destination", plan.destination, dst)):
        expected = {plan.names[i]: (side.shapes[i], plan.dtypes[i]) for i in side.expected(rank).tolist()}
        where = f"rank {rank}, {label} layout {side.name}"
        for name in expected.keys() - tensors.keys():
            problems.append(f"{where}: parameter {name} is missing; expected shape {expected[name][0]}")
        for name in tensors.keys() - expected.keys():
            problems.append(f"{where}: parameter {name} is not expected; found shape {tuple(tensors[name].shape)}")
        for name in expected.keys() & tensors.keys():
            tensor, (shape, dtype) = tensors[name], expected[name]
            here = f"{where}, parameter {name}"
            found = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != shape:
                problems.append(f"{here}: expected shape {shape}, found {tuple(tensor.shape)}")
            elif found != dtype:
                problems.append(f"{here}: expected dtype {dtype}, found {found}; both layouts must keep one dtype")
            elif device is not None and not _same_device(tensor.device, device):
                problems.append(f"{here}: expected device {device}, found {tensor.device}")
            elif not tensor.is_contiguous():
                problems.append(f"{here}: expected a contiguous tensor, found strides {tensor.stride()}")
            elif tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.element_size():
                problems.append(f"{here}: its memory has been released; bring it back before moving weights")
            elif tensor.numel():
                start = tensor.data_ptr()
                spans.append((start, start + tensor.numel() * tensor.element_size(), label, name))
    problems.extend(f"rank {rank}: {line}" for line in _overlaps(spans))
    problems.extend(f"rank {rank}: {line}" for line in _moving_aliases(plan, rank, src, dst))
    return sorted(problems)


def _same_device(found: torch.device, expected: torch.device) -> bool:
    return found.type == expected.type and (expected.index is None or found.index == expected.index)


def _overlaps(spans: list[tuple[int, int, str, str]]) -> Iterator[str]:
    """Destination memory that is also other memory: writing it would destroy what is still needed."""
    spans.sort()
    active: list[tuple[int, int, str, str]] = []
    for span in spans:
        active = [other for other in active if other[1] > span[0]]
        for other in active:
            inner, outer = (other, span) if other[2] == "destination" else (span, other)
            aliased = inner[3] == outer[3] and inner[2] != outer[2] and outer[0] <= inner[0] and inner[1] <= outer[1]
            if "destination" in (other[2], span[2]) and not aliased:
                yield (
                    f"{other[2]} parameter {other[3]} and {span[2]} parameter {span[3]} share memory; expected "
                    "separate memory, or one parameter at one place in both layouts"
                )
        active.append(span)


def _moving_aliases(plan: Plan, rank: int, src: Tensors, dst: Tensors) -> Iterator[str]:
    """A parameter whose destination is a part of its source's memory must be all local and stay where it is."""
    rows: Rows | None = None
    for index, name in enumerate(plan.names):
        if name not in src or name not in dst or not src[name].numel():
            continue
        size = src[name].element_size()
        shift, rest = divmod(dst[name].data_ptr() - src[name].data_ptr(), size)
        if rest or not 0 <= shift < src[name].numel():
            continue
        if rows is None:
            rows = plan.rows_of(rank)
        mine = (rows.param == index) & (rows.dst == rank) & (rows.src != FILL)
        stays = (rows.src == rank) & (rows.src_offset == rows.dst_offset + shift) & (rows.src_pitch == rows.dst_pitch)
        if bool((mine & ~stays).any()):
            yield (
                f"parameter {name} has one memory for {plan.source.name} and {plan.destination.name}, but its values "
                "change place; expected separate memory"
            )
