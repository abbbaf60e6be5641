"""A small picture of who holds what before and after a switch: one block of characters for each kind of rank."""

import math
from collections.abc import Iterator

from rl3d.estimate.moves import Move
from rl3d.layout import ShardLayout

KEPT, RECEIVED, LEFT, NONE = "█", "▒", "░", "·"
LEGEND = (
    f"{KEPT} held before and after   {RECEIVED} received   {LEFT} held before only   {NONE} never held\n"
    "lines: stages of layers, the first on top; columns: slices of a matrix"
)
_COLUMNS = 16
_LINES = 8

Cells = tuple[tuple[str, ...], ...]


def draw(move: Move, width: int = 80) -> str:
    """Blocks for ranks that hold different things, side by side; ranks that hold the same share one.

    A block's lines are layers, one line for each stage (the embedding lies on the first, the head on the last); its
    columns are the slices of a matrix that is cut by tensor parallelism.
    """
    kinds: dict[Cells, list[int]] = {}
    for rank in move.source.ranks:
        kinds.setdefault(cells(move, rank), []).append(rank)
    blocks = [[_names(ranks), *("".join(line) for line in lines)] for lines, ranks in kinds.items()]
    size = max(len(line) for block in blocks for line in block) + 3
    in_row = max(1, width // size)
    shown = blocks[: 4 * in_row]
    out = []
    for start in range(0, len(shown), in_row):
        row = shown[start : start + in_row]
        out += ["".join(line.ljust(size) for line in lines).rstrip() for lines in zip(*row, strict=True)] + [""]
    if len(shown) < len(blocks):
        out += [f"({len(blocks) - len(shown)} more kinds of ranks)", ""]
    return "\n".join([*out, LEGEND])


def cells(move: Move, rank: int) -> Cells:
    """The block of one rank. Lines are stages (neighbours merged beyond 8), columns slices of a matrix."""
    parts = move.source.parts or 1
    columns = math.lcm(move.source.tp * parts, move.target.tp)
    while columns > _COLUMNS and columns % 2 == 0 and columns // 2 >= max(move.source.tp, move.target.tp):
        columns //= 2
    stages = len(move.source.layers)
    lines = min(stages, _LINES)
    wide = 2 if columns <= 4 else 1  # a lone column is too thin to see
    sign = {(True, True): KEPT, (False, True): RECEIVED, (True, False): LEFT, (False, False): NONE}
    grid = []
    for line in range(lines):
        covered = range(line * stages // lines, (line + 1) * stages // lines)
        before = _slices(move.source, rank, columns, parts) if _stage(move.source, rank) in covered else set()
        after = _slices(move.target, rank, columns, 1) if rank in move.target.places else set()
        grid.append(tuple(sign[column in before, column in after] * wide for column in range(columns)))
    return tuple(grid)


def _stage(layout: ShardLayout, rank: int) -> int:
    return layout.places[rank][0]


def _slices(layout: ShardLayout, rank: int, columns: int, parts: int) -> set[int]:
    """Columns that a rank's part of a matrix touches."""
    place = layout.places[rank]
    part = tuple(place)[2] if parts > 1 else 0
    cuts = layout.tp * parts
    index = place[1] * parts + part
    return set(range(index * columns // cuts, max((index + 1) * columns // cuts, index * columns // cuts + 1)))


def _names(ranks: list[int]) -> str:
    """Rank numbers with runs written short: ``0-3 8 12``; many are counted."""
    runs = list(_runs(ranks))
    text = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:4])
    return f"rank {text}" + (f" +{len(ranks) - sum(b - a + 1 for a, b in runs[:4])}" if len(runs) > 4 else "")


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    start = last = ranks[0]
    for rank in ranks[1:]:
        if rank != last + 1:
            yield start, last
            start = rank
        last = rank
    yield start, last
