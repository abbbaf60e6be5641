"""Point-to-point messages of torch.distributed: NCCL between GPUs, gloo between CPU processes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl3d.kernels import CopyTable
from rl3d.reshard.plan import ReshardError
from rl3d.reshard.program import Program
from rl3d.reshard.spans import Timeline
from rl3d.reshard.streams import places


class Staging:
    """The two buffers that messages are packed into and received in, as large as the fullest buckets of their users.

    Transports that never move at once may share one.
    """

    def __init__(self, device: torch.device) -> None:
        self.out = self.into = torch.empty(0, dtype=torch.uint8, device=device)
        self.epoch = 0
        """Grows when a buffer is at another address."""

    def reserve(self, out: int, into: int) -> None:
        """Have buffers of at least so many bytes."""
        for name, size in (("out", out), ("into", into)):
            if getattr(self, name).numel() < size:
                device = getattr(self, name).device
                setattr(self, name, torch.empty(0, dtype=torch.uint8, device=device))  # the old one goes first
                setattr(self, name, torch.empty(size, dtype=torch.uint8, device=device))
                self.epoch += 1


class CollectiveTransport:
    """One packed message per (source, destination, bucket), all of a bucket posted together.

    The two staging buffers (:class:`Staging`, its own unless one is given to share) are allocated once, for the two fullest
    buckets, and reused. A bucket's boxes go into and out of them by one table of copies each, while the messages of its
    neighbours travel; where boxes are handed on, a bucket may be made of what the one before it brings, and they take turns.
    """

    name, inside = "collective", "messages"

    def __init__(self, group: "dist.ProcessGroup | None", device: torch.device, staging: Staging | None = None) -> None:
        if dist.is_available() and dist.is_initialized() and device.type != "cpu":
            backend = dist.get_backend_config(group)
            if "nccl" not in backend:
                raise ReshardError(
                    f"device {device} with the backend {backend}: it cannot send GPU tensors from rank to rank; use an "
                    "NCCL group, or let the ranks of a host read each other's memory (layout.transport=peer)"
                )
        self.group = group
        self.device = device
        self.staging_bytes = 0
        self._steps: list[_Step] = []
        self._staging = Staging(device) if staging is None else staging
        self._epoch = -1  # of the staging buffers, when the steps were made

    def prepare(self, program: Program) -> None:
        count = places(len(program.buckets), program.relays)
        self._staging.reserve(count * program.send_staging, count * program.receive_staging)
        self.staging_bytes = count * max(program.send_staging, program.receive_staging)
        self._steps, self._epoch = [], self._staging.epoch
        for number, bucket in enumerate(program.buckets):
            place = number % count
            out = self._staging.out[place * program.send_staging :]
            into = self._staging.into[place * program.receive_staging :]
            pack = [(slot, box) for message in bucket.sends for box, slot in message.slots(out)]
            unpack = [pair for message in bucket.receives for pair in message.slots(into)]
            # P2POp takes global ranks and translates them for the group itself.
            operations = [dist.P2POp(dist.irecv, m.buffer(into), m.peer, group=self.group) for m in bucket.receives]
            operations += [dist.P2POp(dist.isend, m.buffer(out), m.peer, group=self.group) for m in bucket.sends]
            self._steps.append(_Step(CopyTable(pack, self.device), operations, CopyTable(unpack, self.device)))

    @torch.no_grad()
    def move(self, program: Program, timeline: Timeline) -> None:
        if self._epoch != self._staging.epoch:
            self.prepare(program)
        ahead = not program.relays
        travelling: list[dist.Work] = []
        for number, step in enumerate(self._steps):
            if number == 0 or not ahead:
                travelling = self._post(step, timeline)
            # its place in staging memory is free: the bucket before this one has been unpacked (on a GPU, by whatever is
            # queued before)
            following = self._post(self._steps[number + 1], timeline) if ahead and step is not self._steps[-1] else []
            with timeline.span("copy"):
                for work in travelling:
                    work.wait()
            with timeline.span("stage"):
                step.unpack.run()
            travelling = following

    def _post(self, step: "_Step", timeline: Timeline) -> list[dist.Work]:
        with timeline.span("stage"):
            step.pack.run()
        with timeline.span("copy"):
            return list(dist.batch_isend_irecv(step.operations))


@dataclass
class _Step:
    """A bucket: what goes into staging memory, its messages, and what comes out of it."""

    pack: CopyTable
    operations: list[dist.P2POp]
    unpack: CopyTable
