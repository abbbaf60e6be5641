"""Bytes of weights, gradients and optimiser state as DeepSpeed 0.19 lays them out, on one rank.

Which of DeepSpeed's optimisers runs depends on stage, dtype, pipeline and offload; ``rl3d.engine.zero`` chooses, and
this follows it.
"""

from dataclasses import dataclass, field

from rl3d.distributed.page_locked import page_locked_bytes
from rl3d.estimate.settings import MemorySettings
from rl3d.layout import TrainLayout

FP32 = 4
_PERSISTENT = 10_000  # elements: smaller parameters stay whole at stage 3
_LIVE = 1_000_000_000  # elements that DeepSpeed's stage 3 lets stay gathered


@dataclass
class States:
    """Bytes on one rank.

    Attributes:
        held: item -> bytes on the device between steps, always there.
        gradients: gradients between the micro-batches of a step, where they are not in ``held``.
        bucket: the buffer that gradients of a backward pass are collected in (stage 2).
        within: all buffers of a reduction that happens during the backward pass (stages 2 and 3).
        left: share of the backward pass that is still to come at the first such reduction.
        after: buffers of the reduction after the last backward pass (stages 0 and 1).
        step: what the optimiser step needs beside ``held``, gradients included.
        gathered: weights gathered for the layers at work (stage 3).
        host: item -> bytes of host memory.
    """

    held: dict[str, int]
    gradients: int = 0
    bucket: int = 0
    within: int = 0
    left: float = 0.0
    after: int = 0
    step: int = 0
    gathered: int = 0
    host: dict[str, int] = field(default_factory=dict)


def stage_run(train: TrainLayout, bf16: bool) -> int:
    """The ZeRO stage that really runs for the one asked for."""
    if train.zero == 0 and bf16:
        return 1
    return 1 if train.zero == 2 and train.pp > 1 else train.zero


def states(numels: tuple[int, ...], train: TrainLayout, settings: MemorySettings) -> States:
    """What a rank that holds parameters of these sizes keeps for training them. ``train`` must be resolved."""
    assert train.dp is not None
    stage, dp, b = stage_run(train, settings.bf16), train.dp, settings.element
    total, largest = sum(numels), max(numels, default=0)
    bucket = min(total, settings.bucket)
    offload = settings.offload != "none" and settings.device == "cuda"
    if stage == 3:
        return _sharded(numels, dp, bucket, settings, offload)
    unit = 2 * dp  # DeepSpeed aligns partitions to two elements
    padded = -(-total // unit) * unit
    part = padded // dp
    if stage == 0:  # all-reduced in pieces of 500M elements; torch's optimiser works on the weights themselves
        return States({"weights": b * total, "Adam moments": 2 * FP32 * total}, gradients=b * total,
                      after=b * min(total, 500_000_000 + largest), step=b * total + FP32 * largest)  # fmt: skip
    optimizer = {"master weights": FP32 * part, "Adam moments": 2 * FP32 * part}
    if stage == 1 and settings.bf16 and settings.offload == "none":
        # BF16_Optimizer: gradients accumulate whole in fp32, and are never given back
        return States({"weights": b * padded, "gradients": FP32 * padded, **optimizer})
    if stage == 1:
        # whole gradients (in fp32 beside bf16 weights), then a bucket, while the rank's partition fills up
        out = States({"weights": b * padded, **optimizer}, gradients=FP32 * total, after=FP32 * max(bucket, part),
                     step=2 * FP32 * part)  # fmt: skip
    else:
        # a bucket of gradients, flattened once more, in fp32 for the wire, into an fp32 partition
        wire = FP32 * bucket if settings.bf16 else 0
        out = States({"weights": b * padded, **optimizer}, gradients=FP32 * part, bucket=b * bucket,
                     within=2 * b * bucket + wire, left=1 - bucket / total,
                     step=FP32 * part + 2 * FP32 * largest)  # fmt: skip
    return _to_host(out, numels, part, b) if offload else out


def _to_host(device: States, numels: tuple[int, ...], part: int, b: int) -> States:
    """The optimiser on the host: master weights, moments, gradients of the partition and the rounded weights on their way
    back, all but the moments page-locked. Gradients accumulate on the device in fp32, as without offload, and leave it
    when the last micro-batch is done (DeepSpeed 0.19 accumulates on the host only in the weights' own 16 bits)."""
    largest = max(numels, default=0)
    held = {"weights": device.held["weights"], "offload buffer": b * largest}
    host = {
        "optimiser (host)": page_locked_bytes(FP32 * part) + 2 * FP32 * part,
        "gradients (host)": page_locked_bytes(FP32 * part),
        "staging (host)": page_locked_bytes(b * part) + page_locked_bytes(b * largest),
    }
    return States(held, gradients=device.gradients, bucket=device.bucket, within=device.within, left=device.left,
                  after=device.after, step=0, host=host)  # fmt: skip


def _sharded(numels: tuple[int, ...], dp: int, bucket: int, settings: MemorySettings, offload: bool) -> States:
    """Stage 3: each parameter's flat shard; gradients reduced through a bucket that is always there."""
    b, total = settings.element, sum(numels)
    part = sum(-(-n // dp) for n in numels)
    whole = b * sum(n for n in numels if n < _PERSISTENT)
    held = {"weights": b * part + whole, "gradients": FP32 * (part + bucket), "master weights": FP32 * part,
            "Adam moments": 2 * FP32 * part}  # fmt: skip
    # what is gathered stays until so many elements are live; each gather has a buffer of its own while it is taken apart
    gathered = b * (min(total, _LIVE) + bucket)
    out = States(held, within=2 * FP32 * bucket, left=1 - bucket / total, step=FP32 * part, gathered=gathered)
    if not offload:
        return out
    locked = page_locked_bytes(FP32 * part)
    out.host = {"optimiser (host)": locked + 2 * FP32 * part, "gradients (host)": 2 * locked}
    out.held = {"weights": held["weights"], "gradients": FP32 * bucket}
    out.step = 0
    if settings.offload == "params":
        out.host["weights (host)"] = page_locked_bytes(b * part)
        out.held["weights"] = whole
    return out
