"""All ranks in one process: the messages are copied from buffer to buffer."""

from collections.abc import Sequence

import torch

from rl3d.reshard.program import Program


@torch.no_grad()
def run_inprocess(programs: Sequence[Program], device: torch.device | None = None) -> int:
    """Run the programs of all ranks of a plan; returns the largest staging buffer in bytes."""
    device = device or torch.device("cpu")
    by_rank = {p.rank: p for p in programs}
    out = {p.rank: torch.empty(p.send_staging, dtype=torch.uint8, device=device) for p in programs}
    into = {p.rank: torch.empty(p.receive_staging, dtype=torch.uint8, device=device) for p in programs}
    for program in programs:
        program.run_local()
    for index in sorted({bucket.index for p in programs for bucket in p.buckets}):
        current = {rank: b for rank, p in by_rank.items() for b in p.buckets if b.index == index}
        for rank, bucket in current.items():
            for message in bucket.sends:
                for box, slot in message.slots(out[rank]):
                    slot.copy_(box)
        for rank, bucket in current.items():
            for message in bucket.receives:
                sent = next(m for m in current[message.peer].sends if m.peer == rank)
                message.buffer(into[rank]).copy_(sent.buffer(out[message.peer]))
                for box, slot in message.slots(into[rank]):
                    box.copy_(slot)
    return max((max(p.send_staging, p.receive_staging) for p in programs), default=0)
