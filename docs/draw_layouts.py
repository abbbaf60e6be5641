"""Draw docs/img/layouts.svg: who holds what on four ranks, training TP2·PP2 and generating TP4.

    python docs/draw_layouts.py [OUT.svg]

The boxes are asked of the same layouts that the planner works on. A column is a quarter of a weight matrix (cut along
the dimension that tensor parallelism cuts), a row is a layer.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from rl3d.layout import GenLayout, GenMesh, Mesh, ParamSpec, TrainLayout
from rl3d.layout.sharding import ShardLayout
from rl3d.reshard import choose_mesh_order

RANKS, LAYERS, QUARTERS = 4, 4, 4
CELL_W, CELL_H, GAP, LEFT, TOP, BAND = 34, 20, 28, 122, 52, 132
TRAIN, KEPT, RECEIVED, EMPTY = "#4878a8", "#4878a8", "#e0913a", "#f2f2f2"

Cells = set[tuple[int, int]]


def cells(layout: ShardLayout, specs: list[ParamSpec], rank: int) -> Cells:
    """(layer, quarter) pairs that ``rank`` holds."""
    return {
        (spec.layer, quarter)
        for spec in specs
        if spec.layer is not None
        for shard in layout.shards(spec)
        if rank in shard.ranks
        for holding in shard.holdings
        for quarter in range(holding.box.row, holding.box.row + holding.box.rows)
    }


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def panel(x: float, y: float, held: dict[tuple[int, int], str]) -> Iterator[str]:
    for layer in range(LAYERS):
        for quarter in range(QUARTERS):
            fill = held.get((layer, quarter), EMPTY)
            yield (
                f'<rect x="{x + quarter * CELL_W}" y="{y + layer * CELL_H}" width="{CELL_W}" height="{CELL_H}" '
                f'fill="{fill}" stroke="white" stroke-width="2"/>'
            )


def draw() -> str:
    train, gen = TrainLayout.parse("tp2.pp2"), GenLayout.parse("tp4")
    specs = [ParamSpec(f"layer {i}", (QUARTERS, 1), 0, (QUARTERS,), i, "layer", "bfloat16") for i in range(LAYERS)]
    mesh = Mesh.of(train, RANKS, choose_mesh_order(specs, train, gen, RANKS))
    source = ShardLayout.training(mesh, LAYERS)
    target = ShardLayout.generation(GenMesh(gen.tp, tuple(range(RANKS))), LAYERS)
    pitch = QUARTERS * CELL_W + GAP
    width, height = LEFT + RANKS * pitch, TOP + 2 * BAND + 18
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(12, TOP + 34, "training", 15, weight="bold"), text(12, TOP + 54, "TP2 · PP2"),
        text(12, TOP + BAND + 34, "generation", 15, weight="bold"), text(12, TOP + BAND + 54, "TP4"),
    ]  # fmt: skip
    for rank in range(RANKS):
        x, place = LEFT + rank * pitch, mesh.coords(rank)
        before, after = cells(source, specs, rank), cells(target, specs, rank)
        out.append(text(x + QUARTERS * CELL_W / 2, 24, f"rank {rank}", 15, "middle", "bold"))
        out.append(text(x + QUARTERS * CELL_W / 2, TOP - 10, f"stage {place.pp}, half {place.tp}", 12, "middle"))
        out += panel(x, TOP, dict.fromkeys(before, TRAIN))
        out.append(text(x + QUARTERS * CELL_W / 2, TOP + BAND - 10, f"quarter {rank} of every layer", 12, "middle"))
        out += panel(x, TOP + BAND, {cell: KEPT if cell in before else RECEIVED for cell in after})
    y = TOP + 2 * BAND - 10
    for x, fill, words in ((LEFT, KEPT, "on the rank already"), (LEFT + 300, RECEIVED, "received at the switch")):
        out.append(f'<rect x="{x}" y="{y - 12}" width="16" height="14" fill="{fill}"/>')
        out.append(text(x + 24, y, words))
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "img" / "layouts.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw())
    print(path)
