"""Point-to-point messages of torch.distributed: NCCL between GPUs, gloo between CPU processes."""

import torch
import torch.distributed as dist

from rl3d.kernels import CopyTable
from rl3d.reshard.plan import ReshardError
from rl3d.reshard.program import Program
from rl3d.reshard.spans import Timeline


class Staging:
    """The two buffers that messages are packed into and received in, as large as the fullest bucket of their users.

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

    The two staging buffers (:class:`Staging`, its own unless one is given to share) are allocated once, as large as the
    fullest bucket, and reused. A bucket's boxes go into and out of them by one table of copies each.
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
        self._tables: list[tuple[CopyTable, CopyTable]] = []
        self._staging = Staging(device) if staging is None else staging
        self._epoch = -1  # of the staging buffers, when the tables were made

    def prepare(self, program: Program) -> None:
        self._staging.reserve(program.send_staging, program.receive_staging)
        self.staging_bytes = max(program.send_staging, program.receive_staging)
        self._tables, self._epoch = [], self._staging.epoch
        for bucket in program.buckets:
            pack = [(slot, box) for message in bucket.sends for box, slot in message.slots(self._staging.out)]
            unpack = [pair for message in bucket.receives for pair in message.slots(self._staging.into)]
            self._tables.append((CopyTable(pack, self.device), CopyTable(unpack, self.device)))

    @torch.no_grad()
    def move(self, program: Program, timeline: Timeline) -> None:
        if self._epoch != self._staging.epoch:
            self.prepare(program)
        out, into = self._staging.out, self._staging.into
        for bucket, (pack, unpack) in zip(program.buckets, self._tables, strict=True):
            # P2POp takes global ranks and translates them for the group itself.
            operations = [dist.P2POp(dist.irecv, m.buffer(into), m.peer, group=self.group) for m in bucket.receives]
            with timeline.span("stage"):
                pack.run()
            operations += [dist.P2POp(dist.isend, m.buffer(out), m.peer, group=self.group) for m in bucket.sends]
            with timeline.span("copy"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            with timeline.span("stage"):
                unpack.run()
