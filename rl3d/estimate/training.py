"""Seconds of passes over packed rows and of optimiser steps, without the bubbles of a pipeline."""

from dataclasses import dataclass

from rl3d.estimate.generating import ATTENTION
from rl3d.estimate.kernels import (
    BUCKET,
    COLLECTIVE,
    COLLECTIVE_START,
    Sizes,
    all_reduce,
    collective,
    head,
    layer_products,
    memory_seconds,
    product,
)
from rl3d.estimate.topology import Topology
from rl3d.layout import TrainLayout
from rl3d.models import Architecture

OPTIMIZER_BYTES = 28
"""Read and written for each parameter by AdamW with fp32 master weights: gradient, weight and two moments."""
ACCUMULATION_BYTES = 12
"""Read and written for each parameter when a row's bf16 gradient is widened and added up in fp32."""
REDUCED_BYTES = 4
"""Of a gradient when it is reduced over data parallelism: fp32, whatever the weights are."""
HOST_BANDWIDTH = 37e9
"""Bytes/s of one rank's optimiser in host memory: torch's fused AdamW takes 7.6 ms for 10M parameters."""
PCIE_BANDWIDTH = 25e9
"""Bytes/s of one GPU to or from host memory, PCIe 4."""


@dataclass(frozen=True)
class Rows:
    """What one data-parallel rank passes over in a mini-batch: ``count`` rows of ``tokens`` tokens, sequences of
    ``length`` each, logits for ``predicted`` tokens of a row."""

    count: int
    tokens: float
    length: int
    predicted: float


class Pass:
    """Passes of one model over a mini-batch on one rank.

    ``columns``: whether there are logits (a critic has none); ``sequence_parallel``: norms and residuals are cut over the
    tensor-parallel ranks, and what were all-reduces are all-gathers and reduce-scatters of as many bytes.
    """

    def __init__(self, arch: Architecture, train: TrainLayout, rows: Rows, topology: Topology, itemsize: int, *,
                 sequence_parallel: bool, columns: bool = True) -> None:  # fmt: skip
        self.arch, self.train, self.rows, self.topology, self.itemsize = arch, train, rows, topology, itemsize
        self.sequence_parallel = sequence_parallel and train.tp > 1
        self.columns = columns

    def forward(self) -> float:
        """Layers, logits, and what travels between ranks, divided by the stages."""
        return (self.layers() + self._ends()) / self.train.pp + self._stages()

    def training(self, recompute: str) -> float:
        """Forward and backward. A backward pass costs two forward passes, of the logits three: they are computed again."""
        rows, train = self.rows, self.train
        total = 3 * (self.layers() + self._ends())
        if self.columns:
            total += rows.count * product(rows.predicted, self.arch.hidden_size, self.arch.vocab_size / train.tp,
                                          self.itemsize, self.topology)  # fmt: skip
        if recompute == "full":
            total += self.layers()
        if self.sequence_parallel:  # inputs of products are gathered again for the gradients of their weights
            total += rows.count * self.arch.num_layers * self._reduce()
        gradients = self.arch.num_parameters / train.tp * ACCUMULATION_BYTES
        return (total + rows.count * memory_seconds(gradients, self.topology)) / train.pp + 3 * self._stages()

    def layers(self) -> float:
        """One forward pass of all layers over all rows."""
        arch, tp, rows, topology, itemsize = self.arch, self.train.tp, self.rows, self.topology, self.itemsize
        s = Sizes.of(arch, tp)
        norms = 10 * s.hidden / (tp if self.sequence_parallel else 1)  # read, write; sums read 2, write 1; each twice
        elements = norms + (2 * s.query + 6 * s.key) + (2 * s.query + 2 * s.key) + 3 * s.ffn
        layer = layer_products(arch, tp, rows.tokens, itemsize, topology)
        layer += memory_seconds(elements * rows.tokens * itemsize, topology)
        layer += 2 * rows.tokens * rows.length * s.query / (topology.peak_tflops * 1e12 * ATTENTION)
        return rows.count * arch.num_layers * (layer + 2 * self._reduce())

    def _reduce(self) -> float:
        return all_reduce(self.arch, self.train.tp, self.rows.tokens, self.itemsize, self.topology)

    def _ends(self) -> float:
        """The logits, and the hidden states gathered for them."""
        rows = self.rows
        found = self._reduce() / 2 if self.sequence_parallel else 0.0
        if self.columns:
            found += head(self.arch, self.train.tp, rows.predicted, self.itemsize, self.topology)
        return rows.count * found

    def _stages(self) -> float:
        """Activations between stages."""
        train, topology = self.train, self.topology
        if train.pp == 1:
            return 0.0
        inside = train.model_parallel <= topology.gpus_per_node
        rate = 1e9 * (topology.inside_gb_per_s if inside else topology.between_gb_per_s)
        return train.vpp * self.rows.count * self.rows.tokens * self.arch.hidden_size * self.itemsize / rate


def optimizer_seconds(arch: Architecture, train: TrainLayout, topology: Topology, rows: int, evaluated: int, itemsize: int,
                      offload: str) -> float:  # fmt: skip
    """Gradients summed and weights gathered over data parallelism, and the optimiser, in one mini-batch.

    Without a pipeline, stages 2 and 3 reduce the gradients of each of ``rows`` rows; stage 3 gathers the weights for every
    pass over every row, of which ``evaluated`` are forward only.
    """
    assert train.dp is not None
    dp, local = train.dp, arch.num_parameters / train.model_parallel
    part = local / (1 if train.zero == 0 else dp)
    optimizer = memory_seconds(part * OPTIMIZER_BYTES, topology)
    if offload != "none":  # gradients go to the host, weights come back
        optimizer = part * (OPTIMIZER_BYTES / HOST_BANDWIDTH + 2 * itemsize / PCIE_BANDWIDTH)
    gathers = (evaluated + 2) * rows if train.zero == 3 else 1
    reductions = rows if train.zero >= 2 and train.pp == 1 else 1
    fetched = gathers * part * itemsize / PCIE_BANDWIDTH if offload == "params" and train.zero == 3 else 0.0
    if dp == 1:
        return optimizer + fetched
    gathered, reduced = (_over_dp(local * size, train, topology) for size in (itemsize, REDUCED_BYTES))
    return gathers * gathered + reductions * reduced + optimizer + fetched


def _over_dp(nbytes: float, train: TrainLayout, topology: Topology) -> float:
    """Seconds of one reduction or gathering of so many bytes over data parallelism, in buckets.

    A ring that leaves the node shares the node's cards with the rings that leave it; the ranks of one ring inside a node
    pass data on over fast links, so a ring may use the cards of all of them.
    """
    assert train.dp is not None
    buckets = max(1.0, nbytes / BUCKET)
    if train.model_parallel * train.dp <= topology.gpus_per_node:
        return collective(nbytes, train.dp, topology, buckets)
    rings = min(train.model_parallel, topology.gpus_per_node)
    rate = min(topology.inside_gb_per_s, topology.nics_per_node * topology.between_gb_per_s / rings)
    return (train.dp - 1) / train.dp * nbytes / (rate * 1e9 * COLLECTIVE) + buckets * COLLECTIVE_START / 2
