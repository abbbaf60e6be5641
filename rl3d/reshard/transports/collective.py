"""Point-to-point messages of torch.distributed: NCCL between GPUs, gloo between CPU processes."""

import torch
import torch.distributed as dist

from rl3d.kernels import CopyTable
from rl3d.reshard.plan import ReshardError
from rl3d.reshard.program import Program
from rl3d.reshard.spans import Timeline


class CollectiveTransport:
    """One packed message per (source, destination, bucket), all of a bucket posted together.

    The two staging buffers are allocated once, as large as the fullest bucket, and reused. A bucket's boxes go into and
    out of them by one table of copies each.
    """

    name = "collective"

    def __init__(self, group: "dist.ProcessGroup | None", device: torch.device) -> None:
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
        self._out = self._in = torch.empty(0, dtype=torch.uint8, device=device)

    def prepare(self, program: Program) -> None:
        if self._out.numel() != program.send_staging:
            self._out = torch.empty(program.send_staging, dtype=torch.uint8, device=self.device)
        if self._in.numel() != program.receive_staging:
            self._in = torch.empty(program.receive_staging, dtype=torch.uint8, device=self.device)
        self.staging_bytes = max(program.send_staging, program.receive_staging)
        self._tables = []
        for bucket in program.buckets:
            pack = [(slot, box) for message in bucket.sends for box, slot in message.slots(self._out)]
            unpack = [pair for message in bucket.receives for pair in message.slots(self._in)]
            self._tables.append((CopyTable(pack, self.device), CopyTable(unpack, self.device)))

    @torch.no_grad()
    def move(self, program: Program, timeline: Timeline) -> None:
        for bucket, (pack, unpack) in zip(program.buckets, self._tables, strict=True):
            # P2POp takes global ranks and translates them for the group itself.
            operations = [dist.P2POp(dist.irecv, m.buffer(self._in), m.peer, group=self.group) for m in bucket.receives]
            with timeline.span("stage"):
                pack.run()
            operations += [dist.P2POp(dist.isend, m.buffer(self._out), m.peer, group=self.group) for m in bucket.sends]
            with timeline.span("copy"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            with timeline.span("stage"):
                unpack.run()
