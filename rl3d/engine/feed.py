"""Weights for an engine that has a model of its own: Hugging Face tensors, one at a time, from any training layout.

Parameters travel in buckets, each by a plan of its own whose destination is the whole parameter on every generating
rank. A rank holds one bucket and the tensor cut from it, never the model.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.estimate.rollout import BUCKET_BYTES
from rl3d.io.export_hf import hf_tensors
from rl3d.layout.sharding import ShardLayout
from rl3d.models import MappedParameter
from rl3d.reshard import streams
from rl3d.reshard.executor import MoveReport, Resharder
from rl3d.reshard.plan import ReshardError
from rl3d.reshard.planner import build_plan
from rl3d.reshard.spans import Span

Load = Callable[[Iterator[tuple[str, Tensor]]], None]


class FeedError(RuntimeError):
    """A generation engine refused the weights; the message names the rank and the reason. Raised on every rank."""


class WeightFeed:
    """Moves the training weights into ``load``, any number of times; stands where a :class:`Resharder` could.

    Construction and :meth:`run` are collective over ``group``.

    Args:
        mapped: all parameters, in the order in which they are fed.
        source: the training layout.
        target: whole models (tp 1) on the ranks that generate.
        src: canonical name -> this rank's tensor under ``source``.
        load: takes (Hugging Face name, tensor) pairs, in ``run``; ``None`` on ranks that do not generate. A tensor is
            valid until the next module's first one is asked for.
        bucket_bytes: modules travel together up to this size (:data:`BUCKET_BYTES`); a larger one travels alone.
    """

    def __init__(self, mapped: Sequence[MappedParameter], source: ShardLayout, target: ShardLayout,
                 src: Mapping[str, Tensor], load: Load | None, *, rank: int, group: Any, device: torch.device,
                 staging_bytes: int, nodes: Sequence[int] | None = None,
                 bucket_bytes: int | None = None) -> None:  # fmt: skip
        self.src, self.load = dict(src), load
        self.rank, self.group, self.device, self.nodes = rank, group, device, nodes
        self.buckets = [list(bucket) for bucket in _buckets(mapped, bucket_bytes or BUCKET_BYTES)]
        cap = streams.bucket_bytes(staging_bytes)
        self._plans = [
            build_plan([m.spec for m in bucket], source, target, staging_bytes=cap, nodes=nodes) for bucket in self.buckets
        ]
        self._movers: list[Resharder | None] = [None] * len(self.buckets)
        self._holds = rank in target.places

    def run(self) -> MoveReport:
        """Feed every tensor once.

        Raises:
            FeedError: on every rank, when ``load`` raised on one; all tensors have been moved by then.
        """
        reports: list[MoveReport] = []
        tensors, start = self._tensors(reports), time.perf_counter()
        error: Exception | None = None
        try:
            if self.load is not None:
                self.load(tensors)
        except ReshardError:  # raised on every rank
            raise
        except Exception as problem:
            error = problem
        for _ in tensors:  # what is left: other ranks wait for this one's part of it
            pass
        self._agree(error)
        return _total(reports, start)

    def _agree(self, error: Exception | None) -> None:
        mine = "" if error is None else f"rank {self.rank}: {type(error).__name__}: {error}"
        told = [mine]
        if dist.is_initialized():
            told *= dist.get_world_size(self.group)
            dist.all_gather_object(told, mine, group=self.group)
        if any(told):
            raise FeedError("the generation engine did not take the weights: " + "; ".join(filter(None, told))) from error

    def release(self) -> None:
        """Let go of the source tensors; set ``src`` anew before the next :meth:`run`."""
        self.src = {}

    def _tensors(self, reports: list[MoveReport]) -> Iterator[tuple[str, Tensor]]:
        widest = max(sum(_numel(m) for m in bucket) for bucket in self.buckets) if self._holds else 0
        dtype = getattr(torch, self.buckets[0][0].spec.dtype)
        memory = torch.empty(widest, dtype=dtype, device=self.device)
        for index, bucket in enumerate(self.buckets):
            whole, start = {}, 0
            for m in bucket if self._holds else ():
                whole[m.spec.name] = memory[start : start + _numel(m)].view(m.spec.shape)
                start += _numel(m)
            src = {m.spec.name: self.src[m.spec.name] for m in bucket if m.spec.name in self.src}
            mover = self._movers[index]
            if mover is None:
                mover = Resharder(self._plans[index], self.rank, self.group, src, whole, self.device, nodes=self.nodes)
                self._movers[index] = mover
            mover.src, mover.dst = src, whole
            reports.append(mover.run())
            mover.release()
            mover.dst = {}
            for m in bucket if self._holds else ():
                yield from hf_tensors(m, whole[m.spec.name])


def _nbytes(m: MappedParameter) -> int:
    return _numel(m) * getattr(torch, m.spec.dtype).itemsize


def _numel(m: MappedParameter) -> int:
    return torch.Size(m.spec.shape).numel()


def _buckets(mapped: Sequence[MappedParameter], limit: int) -> Iterator[list[MappedParameter]]:
    """Whole modules (weight and bias) up to ``limit`` bytes: engines put a module together before they use it."""
    bucket: list[MappedParameter] = []
    for _, group in groupby(mapped, lambda m: m.spec.name.rpartition(".")[0]):
        module = list(group)
        if bucket and sum(map(_nbytes, bucket + module)) > limit:
            yield bucket
            bucket = []
        bucket += module
    yield bucket


def _total(reports: Sequence[MoveReport], start: float) -> MoveReport:
    """One report of all buckets, and as the span ``load`` what the engine took since ``start`` to take them in."""
    spans = [span for report in reports for span in report.spans]
    load = time.perf_counter() - start - sum(span.seconds for span in spans if span.depth == 0)
    links = {key: sum(r.received_by_link.get(key, 0) for r in reports) for key in reports[0].received_by_link}
    sums = {name: sum(getattr(r, name) for r in reports)
            for name in ("bytes_local", "bytes_sent", "bytes_received", "messages")}  # fmt: skip
    return replace(reports[0], **sums, staging_bytes=max(r.staging_bytes for r in reports), received_by_link=links,
                   spans=[*spans, Span("load", start, max(load, 0.0))])  # fmt: skip
