"""The picture of a switch against what the layouts say that ranks hold."""

import pytest

from rl3d.cli.picture import KEPT, LEFT, RECEIVED, cells, draw
from rl3d.estimate.moves import Move, plan_move
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture
from rl3d.models.shapes import shape

H100 = Topology.read("h100-8")
LLAMA = Architecture.from_hf(shape("llama2-7b"))


def _move(train: str, gen: str, gpus: int) -> Move:
    return plan_move(LLAMA, TrainLayout.parse(train), GenLayout.parse(gen), gpus, H100)


@pytest.mark.parametrize(
    "train, gen, gpus",
    [
        ("tp2.pp2", "tp4", 8),
        ("tp4.pp2", "tp2", 8),
        ("pp4", "tp8", 8),
        ("tp8", "tp1", 8),
        ("zero3", "tp4", 8),
        ("pp16", "tp2", 16),
    ],
)
def test_cells_are_the_shares_of_the_weights(train: str, gen: str, gpus: int) -> None:
    """Shares of the cells are shares of the layers' bytes, rank by rank; rough where flat parts cross matrices or two
    stages share a line."""
    move = _move(train, gen, gpus)
    received = move.plan.certificate.received
    layers = 2 * (LLAMA.num_parameters - 2 * 32000 * 4096)  # bytes without embedding and head
    parsed = TrainLayout.parse(train).resolve(gpus)
    assert parsed.dp
    parts = parsed.dp if parsed.zero == 3 else 1
    for rank in range(gpus):
        signs = [sign[0] for line in cells(move, rank) for sign in line]
        kept, received_now, left = (signs.count(sign) / len(signs) for sign in (KEPT, RECEIVED, LEFT))
        assert kept + received_now == pytest.approx(1 / move.gen.tp)
        assert kept + left == pytest.approx(1 / (parsed.tp * min(parsed.pp, 8) * parts))
        rough = parsed.zero == 3 or parsed.pp > 8
        assert received_now * layers == pytest.approx(received[rank], rel=0.3 if rough else 0.15)


def test_many_kinds_are_cut_short() -> None:
    move = _move("tp8.pp8", "tp4", 64)
    picture = draw(move, width=80)
    assert "more kinds of ranks)" in picture
    assert max(len(line) for line in picture.splitlines()) <= 80
