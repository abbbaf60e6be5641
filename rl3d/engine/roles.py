"""Models that only run forward: the reference policy today. They live in the actor's training layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.forward import Pipeline
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.zero.sharded import shard_frozen
from rl3d.models import Architecture


class ForwardRole:
    """A frozen model with a residency of its own.

    Args:
        model: this rank's part with loaded weights.
        residency: ``"device"`` keeps the weights on the device; ``"host"`` keeps them in (pinned) host memory and
            brings them over for each use only.
        sharded: cut the weights over data parallelism as well, as the actor's are at ZeRO stage 3; passes are then
            collective over it.
    """

    def __init__(self, model: Any, arch: Architecture, groups: ModelGroups, *, residency: str = "device",
                 logprob_chunk: int = 1024, sharded: bool = False):  # fmt: skip
        self.model, self.groups, self._sharded = model.requires_grad_(False).eval(), groups, sharded
        self.pipeline = Pipeline(model, groups, arch.vocab_size, logprob_chunk)
        self._device = next(model.parameters()).device
        self._host: list[Tensor] | None = None
        if sharded:
            self._engine = shard_frozen(self.model, groups, on_host=residency == "host")
        elif residency == "host" and self._device.type != "cpu":
            self._host = [p.detach().to("cpu").pin_memory() for p in model.parameters()]
            self._release()

    def _release(self) -> None:
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(0)

    @contextmanager
    def _resident(self) -> Iterator[None]:
        if self._host is None:
            yield
            return
        for parameter, saved in zip(self.model.parameters(), self._host, strict=True):
            parameter.untyped_storage().resize_(saved.untyped_storage().nbytes())
            parameter.data.copy_(saved, non_blocking=True)
        try:
            yield
        finally:
            self._release()

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Log-probabilities [N] of each micro-batch; an empty list except on the last stage."""
        rows = self.pipeline.level(batches) if self._sharded else batches
        with self._resident():
            return [logprobs for logprobs, _ in self.pipeline.logprobs(rows, temperature)][: len(batches)]
