"""The planner: pure arithmetic from two layouts to a plan. No torch, no communication, the same on every rank."""

from collections.abc import Sequence

import numpy as np

from rl3d.layout import LayoutError, ParamSpec, ShardLayout
from rl3d.reshard.boxes import Ints
from rl3d.reshard.certificate import certify
from rl3d.reshard.plan import Plan, Side
from rl3d.reshard.routing import route
from rl3d.reshard.rows import count_rows
from rl3d.reshard.schedule import ALIGN, Segments, schedule
from rl3d.reshard.traffic import Traffic, find_traffic


def build_plan(
    specs: Sequence[ParamSpec],
    src: ShardLayout,
    dst: ShardLayout,
    *,
    staging_bytes: int = 64 << 20,
    nodes: Sequence[int] | None = None,
) -> Plan:
    """Plan the move of a whole model from layout ``src`` to layout ``dst``.

    What a rank already holds is copied in place; everything else comes from a holder, on the same node if there is one,
    so that the busiest sender sends as little as possible; across nodes each byte enters a node once
    (:mod:`rl3d.reshard.routing`).

    Args:
        specs: the model's parameters; the order numbers them.
        src, dst: layouts over global ranks; they may cover different ranks.
        staging_bytes: most bytes of packed messages a rank has in flight, per direction.
        nodes: node of each global rank; one node when left out.

    Raises:
        LayoutError: a name given twice, a box that nobody holds, ``nodes`` or ``staging_bytes`` too short.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LayoutError(f"parameter {twice} is specified twice; names must differ")
    size = max((*src.ranks, *dst.ranks), default=-1) + 1
    if nodes is not None and len(nodes) < size:
        raise LayoutError(f"nodes names the node of {len(nodes)} ranks, but the layouts reach rank {size - 1}")
    if staging_bytes < 8 * ALIGN:
        raise LayoutError(f"staging_bytes = {staging_bytes} is too small; give at least {8 * ALIGN}")
    # Names of nodes may be any numbers; what counts is which ranks share one.
    node_of = np.zeros(size, np.int64)
    if nodes is not None:
        node_of = np.unique(np.asarray(nodes[:size], np.int64), return_inverse=True)[1].reshape(-1)

    traffic = find_traffic(specs, src, dst)
    pieces, levels = route(traffic, node_of)
    wire = schedule(traffic.boxes, pieces, traffic.first, size, staging_bytes)
    segments = _sorted(wire, _kept(traffic), size)
    rows = count_rows(traffic.boxes, segments) + len(traffic.fills)
    certificate = certify(src, dst, traffic, segments, levels, node_of, rows, staging_bytes)
    sides = [_side(layout, specs, size) for layout in (src, dst)]
    dtypes = tuple(s.dtype for s in specs)
    return Plan(tuple(names), dtypes, sides[0], sides[1], traffic.boxes, segments, traffic.fills, certificate)


def _kept(traffic: Traffic) -> Segments:
    """What ranks take from themselves."""
    both = traffic.keeping
    cls = np.repeat(np.arange(len(both)), [len(b) for b in both])
    rank = np.concatenate(both).astype(np.int32) if both else np.zeros(0, np.int32)
    none = np.zeros(len(cls), np.int64)
    stop = traffic.boxes.class_bytes[cls] if len(cls) else none
    return Segments(rank, rank, cls.astype(np.int32), none, stop, (none - 1).astype(np.int32), none > 0)


def _sorted(wire: Segments, kept: Segments, size: int) -> Segments:
    """By bucket, then sender, then receiver; otherwise in the order given."""
    both = kept.join(wire)
    key = ((both.bucket.astype(np.int64) + 1) * size + both.src) * size + both.dst
    order = np.argsort(key, kind="stable")
    return both.take(order)


def _side(layout: ShardLayout, specs: Sequence[ParamSpec], size: int) -> Side:
    holds = np.zeros((len(specs), size), bool)
    known: dict[tuple, tuple[int, ...]] = {}
    columns: dict[tuple, Ints] = {}
    for index, spec in enumerate(specs):
        key = (layout.stages(spec), spec.expert)
        if key not in known:
            known[key] = layout.holders(spec)
            columns[key] = np.array(known[key], np.int64)
        holds[index, columns[key]] = True
    return Side(layout.name, layout.ranks, tuple(layout.local_shape(s) for s in specs), holds)
