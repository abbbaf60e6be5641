"""The planner: pure arithmetic from two layouts to a plan. No torch, no communication, the same on every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl3d.layout import Box, Holding, LayoutError, ParamSpec, Shard, ShardLayout, cut_atoms, itemsize, split_box
from rl3d.reshard.bounds import need_and_own
from rl3d.reshard.plan import FILL, Certificate, Plan, Rows, Side

ALIGN = 16
"""Messages start at multiples of this many bytes in staging memory; staging is budgeted as if every box did."""


@dataclass(frozen=True)
class _Piece:
    """A box that every rank of one destination shard needs, with everybody who could send it."""

    box: Box
    to: Holding
    ranks: tuple[int, ...]
    owners: tuple[tuple[tuple[int, ...], Holding], ...]


def build_plan(
    specs: Sequence[ParamSpec],
    src: ShardLayout,
    dst: ShardLayout,
    *,
    staging_bytes: int = 64 << 20,
    nodes: Sequence[int] | None = None,
) -> Plan:
    """Plan the move of a whole model from layout ``src`` to layout ``dst``.

    What a rank already holds is copied in place; every other box comes from a holder on the same node if there is
    one, and among those from the one that has least to send so far (lowest rank on ties).

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
    node_of = [0] * size if nodes is None else list(nodes)

    table = _Table(size, node_of)
    # Cutting below a quarter of the cap lets buckets fill to at least three quarters.
    granule = staging_bytes // 4
    memo: dict[tuple[int, int, int], list[_Piece]] = {}
    for index in sorted(range(len(specs)), key=lambda i: _layer_order(specs[i])):
        spec, sources, targets = specs[index], src.shards(specs[index]), dst.shards(specs[index])
        width = itemsize(spec.dtype)
        key = (id(sources), id(targets), width)
        if key not in memo:
            memo[key] = list(_pieces(spec, sources, targets, granule // width))
        for piece in memo[key]:
            table.add(index, width, piece)
        table.add_pads(index, targets)

    rows = table.finish(staging_bytes, [itemsize(s.dtype) for s in specs])
    sides = [
        Side(
            layout.name,
            layout.ranks,
            tuple(layout.local_shape(s) for s in specs),
            np.array([[layout.holds(s, r) for r in range(size)] for s in specs], bool).reshape(len(specs), size),
        )
        for layout in (src, dst)
    ]
    certificate = _certify(specs, src, dst, rows, node_of, staging_bytes)
    return Plan(tuple(names), tuple(s.dtype for s in specs), sides[0], sides[1], rows, certificate)


def _layer_order(spec: ParamSpec) -> tuple[int, int]:
    if spec.layer is not None:
        return (1, spec.layer)
    return (0, 0) if "pre" in spec.place else (2, 0)


def _pieces(spec: ParamSpec, sources: tuple[Shard, ...], targets: tuple[Shard, ...], max_elements: int) -> Iterator[_Piece]:
    for target in targets:
        for need in target.holdings:
            for atom, owners in cut_atoms(need.box, [s.holdings for s in sources]):
                if not owners:
                    raise LayoutError(f"{spec.name}: nobody holds {atom} that ranks {target.ranks} need")
                holders = tuple((sources[i].ranks, holding) for i, holding in owners)
                senders = {rank for ranks, _ in holders for rank in ranks}
                away = tuple(r for r in target.ranks if r not in senders)
                here = tuple(r for r in target.ranks if r in senders)
                if here:
                    yield _Piece(atom, need, here, holders)
                if away:
                    for part in split_box(atom, max_elements):
                        yield _Piece(part, need, away, holders)


class _Table:
    """Rows under construction, and how much every rank sends so far."""

    def __init__(self, size: int, node_of: list[int]) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.load = [0] * size
        self.node_of = node_of

    def add(self, param: int, width: int, piece: _Piece) -> None:
        box, to = piece.box, piece.to
        nbytes, at = box.numel * width, to.locate(box)
        for dst in piece.ranks:
            src, held = self._choose(piece, dst)
            if src != dst:
                self.load[src] += nbytes
            self.rows.append((param, src, dst, *box, held.locate(box), held.pitch, at, to.pitch, nbytes, -1))

    def _choose(self, piece: _Piece, dst: int) -> tuple[int, Holding]:
        best, chosen = None, None
        for ranks, holding in piece.owners:
            for rank in ranks:
                if rank == dst:
                    return rank, holding
                rated = (self.node_of[rank] != self.node_of[dst], self.load[rank], rank)
                if best is None or rated < best:
                    best, chosen = rated, (rank, holding)
        assert chosen is not None
        return chosen

    def add_pads(self, param: int, targets: tuple[Shard, ...]) -> None:
        for target in targets:
            for pad in target.pads:
                for dst in target.ranks:
                    self.rows.append((param, FILL, dst, *pad.box, 0, 0, pad.offset, pad.pitch, 0, -1))

    def finish(self, cap: int, widths: list[int]) -> Rows:
        table = np.array(self.rows, np.int64).reshape(len(self.rows), 13)
        rows = Rows.from_table(table)
        table[:, 12] = _assign_buckets(rows, cap)
        width = np.array(widths, np.int64)[table[:, 0]] if widths else np.zeros(0, np.int64)
        # lexsort: last key first. Falling width keeps the elements of a packed message aligned.
        keys = (table[:, 4], table[:, 3], table[:, 0], -width, table[:, 2], table[:, 1], table[:, 12])
        return Rows.from_table(table[np.lexsort(keys)])


def _assign_buckets(rows: Rows, cap: int) -> NDArray[np.int64]:
    """First bucket with room at both ends, boxes taken in layer order.

    First fit rather than next fit: stages of a pipeline hold different layers, and this way they send side by side
    instead of one after the other.
    """
    out = np.full(len(rows), -1, np.int64)
    # A bucket is closed to a rank once the largest box might not fit. Closed buckets are the bits of an integer, so the
    # first one open at both ends is the lowest zero bit of the two together.
    full = cap - -(-(cap // 4) // ALIGN) * ALIGN
    used: tuple[dict[tuple[int, int], int], ...] = ({}, {})
    closed: tuple[dict[int, int], ...] = ({}, {})
    moved = np.flatnonzero(rows.moved)
    columns = zip(moved.tolist(), rows.src[moved].tolist(), rows.dst[moved].tolist(), rows.nbytes[moved].tolist())
    for row, src, dst, nbytes in columns:
        taken = closed[0].get(src, 0) | closed[1].get(dst, 0)
        bucket = (~taken & (taken + 1)).bit_length() - 1
        out[row] = bucket
        for side, rank in ((0, src), (1, dst)):
            total = used[side].get((rank, bucket), 0) + -(-nbytes // ALIGN) * ALIGN
            used[side][rank, bucket] = total
            if total > full:
                closed[side][rank] = closed[side].get(rank, 0) | 1 << bucket
    return out


def _certify(
    specs: Sequence[ParamSpec], src: ShardLayout, dst: ShardLayout, rows: Rows, node_of: list[int], staging_bytes: int
) -> Certificate:
    size = len(node_of)
    need, own = need_and_own(specs, src, dst)
    moved, nodes = rows.moved, np.array(node_of, np.int64)

    def per_rank(column: NDArray[np.int32], index: NDArray[np.int64]) -> NDArray[np.int64]:
        total = np.zeros(size, np.int64)
        np.add.at(total, column[index], rows.nbytes[index])
        return total

    wire = np.flatnonzero(moved)
    received, sent = per_rank(rows.dst, wire), per_rank(rows.src, wire)
    crossing = wire[nodes[rows.src[wire]] != nodes[rows.dst[wire]]]
    buckets = int(rows.bucket.max(initial=-1)) + 1
    peak = 0
    if len(wire):
        messages, which = np.unique(np.stack([rows.bucket, rows.src, rows.dst])[:, wire], axis=1, return_inverse=True)
        length = np.zeros(messages.shape[1], np.int64)
        np.add.at(length, which.reshape(-1), rows.nbytes[wire])
        length = -(-length // ALIGN) * ALIGN
        for ends in (messages[1], messages[2]):
            used = np.zeros((buckets, size), np.int64)
            np.add.at(used, (messages[0], ends), length)
            peak = max(peak, int(used.max()))
    return Certificate(
        source=src.name,
        destination=dst.name,
        source_ranks=src.ranks,
        destination_ranks=dst.ranks,
        received=tuple(received[list(dst.ranks)].tolist()),
        bound=tuple((need - own)[list(dst.ranks)].tolist()),
        sent=tuple(sent[list(src.ranks)].tolist()),
        local=int(rows.nbytes[rows.src == rows.dst].sum()),
        between_nodes=int(rows.nbytes[crossing].sum()),
        rows=len(rows),
        buckets=buckets,
        staging_bytes=staging_bytes,
        staging_peak=peak,
    )
