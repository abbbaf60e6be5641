"""Lower bounds of a move, from the two layouts alone: no plan is looked at."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import ParamSpec, Shard, ShardLayout, itemsize


def need_and_own(
    specs: Sequence[ParamSpec], src: ShardLayout, dst: ShardLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes that each rank must hold under ``dst``, and how many of them it holds under ``src``.

    No plan can receive less than the difference. Returns two arrays indexed by global rank.
    """
    size = max((*src.ranks, *dst.ranks), default=-1) + 1
    # Parameters of one shape and stage share their shard objects, so they are counted once and multiplied.
    counts: dict[tuple[tuple[Shard, ...], tuple[Shard, ...]], int] = {}
    by_id: dict[tuple[int, int], tuple[tuple[Shard, ...], tuple[Shard, ...]]] = {}
    for spec in specs:
        pair = (src.shards(spec), dst.shards(spec))
        key = by_id.setdefault((id(pair[0]), id(pair[1])), pair)
        counts[key] = counts.get(key, 0) + itemsize(spec.dtype)
    need, own = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for (sources, destinations), weight in counts.items():
        for target in destinations:
            need[list(target.ranks)] += weight * sum(h.box.numel for h in target.holdings)
            for source in sources:
                both = sorted(set(source.ranks) & set(target.ranks))
                if both:
                    own[both] += weight * _common(source, target)
    return need, own


def _common(a: Shard, b: Shard) -> int:
    parts = (x.box.intersect(y.box) for x in a.holdings for y in b.holdings)
    return sum(part.numel for part in parts if part is not None)
