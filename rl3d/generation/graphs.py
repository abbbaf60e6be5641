"""Whole decode steps as CUDA graphs: forward pass, collectives, the draw and the move to the next position, one replay.

A graph belongs to a bucket: a number of rows, a number of table columns and the kind of sampling. It is captured when it
is first needed and stays, while training too: weights are replaced in place, and only pools at a new address (``epoch``)
void it. What pages there are does not matter: the table has columns for the longest sequence always, and addresses of the
pools and distances between their pages and layers stay (:mod:`rl3d.generation.elastic`). Rows and columns beyond the batch
change nothing, because every kernel treats a row by itself and splits are of a fixed size.

Without CUDA the same step runs eagerly, in the same buckets.
"""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import bootstrap
from rl3d.generation.fused import DecodeBody
from rl3d.generation.sampler import Draw, Sampler, SamplingBatch
from rl3d.generation.transfer import to_device
from rl3d.kernels.paged_attention import SPLIT

_log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def row_bucket(rows: int) -> int:
    """Rows that a batch of ``rows`` is computed with: the next of :data:`ROWS`, then multiples of 64."""
    return next((bucket for bucket in ROWS if bucket >= rows), -(-rows // 64) * 64)


def column_bucket(tokens: int, page_size: int, columns: int) -> int:
    """Columns of the table to look at for sequences of up to ``tokens``: a power of two of splits, at most all."""
    reach = SPLIT
    while reach < tokens:
        reach *= 2
    return min(-(-reach // page_size), columns)


@dataclass
class PendingDraw:
    """A draw on its way to the host; at most two of a runner's steps are alive."""

    packed: torch.Tensor  # fp64 [5, rows] on the host once the event has passed
    event: Any

    @classmethod
    def of(cls, draw: Draw) -> "PendingDraw":
        """Start the transfer of a draw into memory of its own."""
        packed = draw.packed()
        if not packed.is_cuda:
            return cls(packed, None)
        on_host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        on_host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(on_host, event)

    def to_host(self) -> list[tuple[int, bool, float, float, float]]:
        """As :meth:`rl3d.generation.sampler.Draw.to_host`; waits for this step only, not for one started since."""
        if self.event is not None:
            self.event.synchronize()
        return [(int(t), bool(c), lp, s, p) for t, c, lp, s, p in zip(*self.packed.tolist(), strict=True)]


class _Buffers:
    """What a step reads and writes; addresses never change."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(*shape, rows, dtype=dtype, device=device)

        self.tokens, self.positions = zeros(torch.int64), zeros(torch.int64)
        self.keys, self.top_k = zeros(torch.int64), zeros(torch.int64)
        self.temperature, self.top_p, self.min_p = zeros(torch.float32), zeros(torch.float32), zeros(torch.float32)
        self._draws = torch.zeros(5 * rows, dtype=torch.float64, device=device)
        on_host = [torch.zeros(5 * rows, dtype=torch.float64, pin_memory=device.type == "cuda") for _ in range(2)]
        self._on_host = on_host  # in turn: a step may start before the last one's draw has been read

    def draws(self, rows: int, turn: int | None = None) -> torch.Tensor:
        """fp64 [5, rows] of a bucket on the device, or on the host for its ``turn`` (0 or 1).

        Contiguous: a part of wider rows would go through pageable memory, and the host would wait for every step.
        """
        whole = self._draws if turn is None else self._on_host[turn]
        return whole[: 5 * rows].view(5, rows)


class DecodeRunner:
    """Steps of a decode batch on one replica. All ranks of the replica call the same methods with the same numbers.

    Args:
        body: forward pass over the pools of ``cache``, which has ``epoch`` and ``page_size``.
        table: int32 [rows, columns], the block table; its address stays, whoever owns it writes it between steps.
        graphs: capture; by default where the table is on CUDA and ranks talk through NCCL, whose collectives are
            captured with the rest. Where a capture fails, this rank's steps stay eager: a replayed collective and a
            launched one are the same to its peers.
    """

    def __init__(self, body: DecodeBody, sampler: Sampler, cache: Any, table: torch.Tensor,
                 graphs: bool | None = None) -> None:  # fmt: skip
        self.body, self.sampler, self.cache = body, sampler, cache
        self.graphs = _can_capture(table, body.group) if graphs is None else graphs
        most = row_bucket(table.shape[0])
        self.table = table
        if most > table.shape[0]:  # rows that pad a bucket need a row of the table, too
            self.table = table.new_zeros(most, table.shape[1])
        self._source = table
        self.buffers = _Buffers(most, table.device)
        self.rows = 0
        self._sampling: SamplingBatch | None = None
        self._captured: dict[tuple[int, int, str], Any] = {}
        self._epoch: int | None = None
        self._pool: Any = None
        self._graph_bytes = 0
        self._turn = 0
        runtime = bootstrap.current()
        if body.group is not None and runtime is not None:
            # NCCL ends a communicator only when no graph holds its collectives any more, and would wait for ever
            # (pytorch#115388)
            myself = weakref.ref(self)
            runtime.before_leaving.append(lambda: _forget(myself()))

    @property
    def captured(self) -> int:
        """Graphs that exist."""
        return len(self._captured)

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that torch keeps for what graphs compute in and leave behind; one pool for all of them."""
        return self._graph_bytes

    def forget(self) -> None:
        """Drop the graphs and the memory that they hold (:attr:`graph_bytes`)."""
        for graph in self._captured.values():
            graph.reset()
        self._captured.clear()
        self._pool, self._graph_bytes = None, 0

    def load(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, sampling: SamplingBatch) -> None:
        """A batch of other members: newest tokens, their positions, and how to draw, in the order of the table's rows."""
        self.rows, self._sampling = len(tokens_B), sampling
        buffers, end = self.buffers, row_bucket(len(tokens_B))
        pairs = (
            (buffers.tokens, tokens_B, 0), (buffers.positions, positions_B, -1), (buffers.keys, sampling.keys, 0),
            (buffers.temperature, sampling.temperature, 1.0), (buffers.top_p, sampling.top_p, 1.0),
            (buffers.top_k, sampling.top_k, 0), (buffers.min_p, sampling.min_p, 0.0),
        )  # fmt: skip
        for buffer, values, padding in pairs:
            buffer[: self.rows].copy_(values)
            buffer[self.rows : end].fill_(padding)

    def keeps(self, live: int) -> bool:
        """Whether a batch of which so many rows are left would be computed with as many rows as now."""
        return row_bucket(live) == row_bucket(self.rows)

    def drop(self, rows: Sequence[int]) -> None:
        """Rows of the batch have ended: from the next step on they are padding. Waits for nothing."""
        self.buffers.positions.index_fill_(0, to_device(list(rows), torch.int64, self.table.device), -1)

    @torch.no_grad()
    def step(self, longest: int) -> PendingDraw:
        """Start one token for every row.

        ``longest``: tokens of the longest sequence, the newest one included.
        """
        assert self._sampling is not None, "load() comes first"
        if self.table is not self._source:
            self.table[: self._source.shape[0]].copy_(self._source)
        columns = column_bucket(longest, self.cache.page_size, self.table.shape[1])
        key = (row_bucket(self.rows), columns, _kind(self._sampling))
        if self._epoch != self.cache.epoch:
            self.forget()
            self._epoch = self.cache.epoch
        if self.graphs and key not in self._captured:
            self._capture(key)
        if self.graphs:
            self._captured[key].replay()
        else:
            self._compute(key)
        self._turn ^= 1
        packed = self.buffers.draws(key[0], self._turn)
        packed.copy_(self.buffers.draws(key[0]), non_blocking=True)
        event = None
        if self.table.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return PendingDraw(packed[:, : self.rows], event)

    def _compute(self, key: tuple[int, int, str]) -> None:
        """The step on the static buffers."""
        rows, columns, _ = key
        buffers = self.buffers
        logits = self.body.forward(buffers.tokens[:rows], buffers.positions[:rows], self.table[:rows, :columns])
        self._draw(logits)

    def _draw(self, logits: torch.Tensor) -> None:
        buffers, rows = self.buffers, len(logits)
        positions = buffers.positions[:rows]
        assert self._sampling is not None
        sampling = replace(
            self._sampling, keys=buffers.keys[:rows], temperature=buffers.temperature[:rows], top_p=buffers.top_p[:rows],
            top_k=buffers.top_k[:rows], min_p=buffers.min_p[:rows],
        )  # fmt: skip
        positions += positions >= 0
        self.sampler.draw(logits, sampling, positions, out=(buffers.tokens[:rows], buffers.draws(rows)))

    def _capture(self, key: tuple[int, int, str]) -> None:
        """Run once outside (kernels compile, libraries allocate), put the state back, and capture."""
        tokens, positions = self.buffers.tokens.clone(), self.buffers.positions.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._compute(key)
        torch.cuda.current_stream().wait_stream(aside)
        self.buffers.tokens.copy_(tokens)
        self.buffers.positions.copy_(positions)
        graph = torch.cuda.CUDAGraph()
        # other threads (the control channel's listener, NCCL's watchdog) may use CUDA meanwhile
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                before = torch.cuda.memory_reserved(self.table.device)
                self._compute(key)
                self._graph_bytes += max(0, torch.cuda.memory_reserved(self.table.device) - before)
        except RuntimeError as error:
            if self.body.group is None:
                raise
            _log.warning("decoding without CUDA graphs from here on, capturing a step with collectives failed: %s", error)
            self.forget()
            self.graphs = False
            return
        self._pool = graph.pool()
        self._captured[key] = graph


def _forget(runner: DecodeRunner | None) -> None:
    if runner is not None:
        runner.forget()


def _can_capture(table: torch.Tensor, group: Any) -> bool:
    # "cpu:gloo,cuda:nccl" is what a group with a backend for each kind of device says
    return table.is_cuda and (group is None or "nccl" in dist.get_backend(group))


def _kind(sampling: SamplingBatch) -> str:
    """What a graph has to know about sampling when it is captured."""
    if sampling.filtered:
        return "filtered" + ", top-k" * sampling.ranked + ", top-p" * sampling.nucleus + ", tempered" * sampling.tempered
    if sampling.greedy:
        return "greedy"
    return "tempered" if sampling.tempered else "plain"
