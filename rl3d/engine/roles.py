"""Models that only run forward, in the actor's training layout: the reference policy, a frozen critic, reward models."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.forward import Pipeline
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.residency import Residency
from rl3d.engine.zero.sharded import shard_frozen
from rl3d.models import Architecture
from rl3d.models.build import canonical_parameters


class ForwardRole:
    """A frozen model, without gradients or optimiser, with a residency of its own.

    Args:
        model: this rank's part with loaded weights.
        arch: what it is; with a value head it has :meth:`values`, otherwise :meth:`logprobs`.
        groups: where it lives.
        residency: ``"device"`` keeps the weights on the device; ``"host"`` keeps them in (pinned) host memory and
            brings them over for each use only.
        sharded: cut the weights over data parallelism as well, as the actor's are at ZeRO stage 3; passes are then
            collective over it.
    """

    def __init__(self, model: Any, arch: Architecture, groups: ModelGroups, *, residency: str = "device",
                 logprob_chunk: int = 1024, sharded: bool = False):  # fmt: skip
        self.model, self.arch, self.groups = model.requires_grad_(False).eval(), arch, groups
        self.pipeline = Pipeline(model, arch, groups, logprob_chunk)
        self._sharded = sharded
        if sharded:
            self._engine = shard_frozen(self.model, groups, on_host=residency == "host")
            residency = "device"  # DeepSpeed brings the shards over, module by module
        self.residency = Residency(lambda: [p.data for p in model.parameters()], residency, constant=True)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's shard; to be read inside ``residency.resident()``."""
        return {name: p.data for name, p in canonical_parameters(self.model, self.arch, self.groups).items()}

    @property
    def shards(self) -> dict[str, Tensor]:
        """As :attr:`weights`; of sharded weights this rank's flat parts, on the training device."""
        named = canonical_parameters(self.model, self.arch, self.groups)
        if not self._sharded:
            return {name: p.data for name, p in named.items()}
        device = self._engine.device
        return {name: p.ds_tensor.data.to(device) for name, p in named.items()}  # type: ignore[attr-defined]

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Log-probabilities [N] of each micro-batch; an empty list except on the last stage."""
        rows = self._rows(batches)
        with self.residency.resident():
            return [logprobs for logprobs, _ in self.pipeline.logprobs(rows, temperature)][: len(batches)]

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [N], fp32, of each micro-batch; an empty list except on the last stage."""
        rows = self._rows(batches)
        with self.residency.resident():
            return self.pipeline.values(rows)[: len(batches)]

    def _rows(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return self.pipeline.level(batches) if self._sharded else batches
