"""Rows of a plan: one line per box, with its place at both ends."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints
from rl3d.reshard.schedule import Segments
from rl3d.reshard.traffic import Boxes

FILL = -1
"""Value of ``src`` for padding rows: zeros are written, nothing is moved."""


@dataclass(frozen=True)
class Rows:
    """Columns of a plan, one entry per box.

    ``src == FILL`` writes zeros into padding; ``src == dst`` is a copy inside a rank; the rest goes over the wire in
    bucket ``bucket`` (-1 for the other two kinds). The global box is ``(row, col, rows, cols)`` of the matrix view.
    Local positions are flat element offsets with a row pitch; those of the sender are in its source tensor, or with
    ``relay`` in its destination tensor, where an earlier bucket has brought the box. Sorted by bucket, source,
    destination, then by falling element size, so that elements inside a packed message are aligned without padding.
    """

    param: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    row: Ints
    col: Ints
    rows: Ints
    cols: Ints
    src_offset: Ints
    src_pitch: Ints
    dst_offset: Ints
    dst_pitch: Ints
    nbytes: Ints
    bucket: NDArray[np.int32]
    relay: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.param)

    def take(self, index: NDArray[Any]) -> "Rows":
        """The chosen rows (index array or mask)."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Mask of rows that go over the wire."""
        return (self.src != self.dst) & (self.src != FILL)


def expand(boxes: Boxes, segments: Segments, fills: Ints) -> Rows:
    """Rows of the given segments and fills (lines of :class:`rl3d.reshard.traffic.Traffic`)."""
    base = boxes.position[boxes.pointer[segments.cls]]
    low = np.searchsorted(boxes.position, base + segments.start, "right") - 1
    high = np.searchsorted(boxes.position, base + segments.stop, "left")
    count = high - low
    line = np.repeat(np.arange(len(count), dtype=np.int32), count)
    entry = np.arange(len(line)) + np.repeat(low - (np.cumsum(count) - count), count)
    box = boxes.entry_box[entry]
    width, cols = boxes.width[box], boxes.cols[box]
    # Only the first and the last box of a segment can be cut.
    first, last = np.zeros_like(entry), boxes.rows[box] * cols
    heads = (np.cumsum(count) - count)[count > 0]
    tails = (np.cumsum(count) - 1)[count > 0]
    filled = np.flatnonzero(count > 0)
    first[heads] = (base + segments.start - boxes.position[low])[filled] // width[heads]
    last[tails] = (base + segments.stop)[filled] - boxes.position[entry[tails]]
    last[tails] //= width[tails]
    parts = _whole_rows(first, last, cols)
    if parts is not None:
        index, first, last = parts
        line, entry, box, width, cols = line[index], entry[index], box[index], width[index], cols[index]
    down, right = np.divmod(first, np.maximum(cols, 1))
    elements = last - first
    # A part is either whole rows or inside one row.
    wide = (right == 0) & (elements % np.maximum(cols, 1) == 0)
    tall = np.where(wide, elements // np.maximum(cols, 1), 1)
    relay = segments.relay[line]
    src_offset, src_pitch = boxes.src_offset[box], boxes.src_pitch[box]
    dst_offset, dst_pitch = boxes.dst_offset[box], boxes.dst_pitch[box]
    if relay.any():
        src_offset, src_pitch = np.where(relay, dst_offset, src_offset), np.where(relay, dst_pitch, src_pitch)
    rows = Rows(
        boxes.entry_param[entry], segments.src[line], segments.dst[line], boxes.row[box] + down, boxes.col[box] + right,
        tall, np.where(wide, cols, elements), src_offset + down * src_pitch + right, src_pitch,
        dst_offset + down * dst_pitch + right, dst_pitch, elements * width, segments.bucket[line], relay,
    )  # fmt: skip
    if len(width) and (width != width[0]).any():
        rows = rows.take(np.lexsort((-width, rows.dst, rows.src, rows.bucket)))
    if not len(fills):
        return rows
    none = np.zeros(len(fills), np.int64)
    blank = Rows(
        fills[:, 0].astype(np.int32), (none + FILL).astype(np.int32), fills[:, 1].astype(np.int32), none, none,
        fills[:, 2], fills[:, 3], none, none, fills[:, 4], fills[:, 5], none, (none - 1).astype(np.int32), none > 0,
    )  # fmt: skip
    return Rows(*(np.concatenate([getattr(blank, f.name), getattr(rows, f.name)]) for f in fields(Rows)))


def _whole_rows(first: Ints, last: Ints, cols: Ints) -> tuple[NDArray, Ints, Ints] | None:
    """Split parts that begin or end inside a row into row ends and whole rows; ``None`` when there are none."""
    top, bottom = -(-first // np.maximum(cols, 1)) * cols, last // np.maximum(cols, 1) * cols
    ragged = ((first != top) | (last != bottom)) & (top <= bottom)
    if not ragged.any():
        return None
    index, starts, stops = [np.flatnonzero(~ragged)], [first[~ragged]], [last[~ragged]]
    here = np.flatnonzero(ragged)
    for a, b in ((first, top), (top, bottom), (bottom, last)):
        some = here[a[here] < b[here]]
        index.append(some)
        starts.append(a[some])
        stops.append(b[some])
    flat, a, b = np.concatenate(index), np.concatenate(starts), np.concatenate(stops)
    order = np.lexsort((a, flat))
    return flat[order], a[order], b[order]


def count_rows(boxes: Boxes, segments: Segments) -> int:
    """Number of rows that :func:`expand` makes of segments, without making them."""
    base = boxes.position[boxes.pointer[segments.cls]]
    begin, end = base + segments.start, base + segments.stop
    low = np.searchsorted(boxes.position, begin, "right") - 1
    high = np.searchsorted(boxes.position, end, "left")
    total = int((high - low).sum())
    # Only where a segment begins or ends inside a row is a box more than one row.
    for entry, other in ((low, None), (high - 1, low)):
        index = slice(None) if other is None else np.flatnonzero(entry != other)
        at = entry[index]
        box = boxes.entry_box[at]
        start, stop = (np.maximum(begin[index] - boxes.position[at], 0),
                       np.minimum(end[index] - boxes.position[at], boxes.entry_bytes[at]))  # fmt: skip
        unit = boxes.cols[box] * boxes.width[box]
        top, bottom = -(-start // unit) * unit, stop // unit * unit
        parts = (start < top).astype(np.int64) + (top < bottom) + (bottom < stop)
        total += int((np.where(top > bottom, 1, parts) - 1).sum())
    return total
