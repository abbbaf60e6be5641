"""What a transport must do; small enough for one that stages messages and one that reads peers' memory directly."""

from typing import Protocol

import torch
import torch.distributed as dist

from rl3d.reshard.program import Program
from rl3d.reshard.spans import Timeline


class Transport(Protocol):
    """Carries a program's buckets between ranks.

    ``name`` is for reports; ``staging_bytes`` is the larger of its two staging buffers (0 for a transport that needs
    none). ``inside`` says how bytes come from other ranks of the node: ``"memory"`` of this rank's own device (on a CPU: of
    the host), ``"peer"``, memory of another GPU, or ``"messages"``.
    """

    name: str
    staging_bytes: int
    inside: str

    def prepare(self, program: Program) -> None:
        """Get ready for a newly bound program: allocate staging, map peers' memory. Called by all ranks alike."""

    def move(self, program: Program, timeline: Timeline) -> None:
        """Carry out all buckets; on return the destination tensors of this rank are complete.

        Spans of ``timeline``: ``stage`` into and out of staging memory, ``copy`` between ranks, ``wait`` for other ranks.
        """


def control_device(group: "dist.ProcessGroup | None", device: torch.device) -> torch.device:
    """Where small tensors that ranks agree by must lie: the host where the group takes them there."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    return torch.device("cpu") if "gloo" in dist.get_backend_config(group) else device
