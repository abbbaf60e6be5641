"""Boxes, atoms and shard layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.layout import Box, GenMesh, Holding, LayoutError, Mesh, ParamSpec, ShardLayout, flat_interval


@st.composite
def boxes(draw, size=9):
    row, col = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
    return Box(row, col, draw(st.integers(1, size - row)), draw(st.integers(1, size - col)))


def _mask(box, size=9):
    mask = np.zeros((size, size), int)
    mask[box.row : box.row + box.rows, box.col : box.col + box.cols] = 1
    return mask


@settings(max_examples=150, deadline=None, derandomize=True)
@given(boxes(), boxes())
def test_intersection_is_the_common_elements(a, b):
    both = a.intersect(b)
    expected = _mask(a) * _mask(b)
    assert (np.zeros_like(expected) if both is None else _mask(both)).tolist() == expected.tolist()
    assert a.contains(b) == bool((expected == _mask(b)).all())


@st.composite
def intervals(draw):
    rows, cols = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    box = Box(draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1)), 0, 0)
    box = box._replace(rows=draw(st.integers(1, rows - box.row)), cols=draw(st.integers(1, cols - box.col)))
    start = draw(st.integers(0, rows * cols))
    return rows, cols, box, start, draw(st.integers(start, rows * cols))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(intervals())
def test_an_interval_of_a_flat_tensor_is_a_few_boxes(case):
    """What ZeRO parts need: boxes of the part, with their places in a tensor that begins where the part does."""
    rows, cols, box, start, stop = case
    local = np.arange(rows * cols).reshape(rows, cols)
    # the box lies somewhere else in the global matrix
    held = Holding(box._replace(row=box.row + 20, col=box.col + 30), box.row * cols + box.col, cols)
    found = flat_interval(held, start, stop)
    assert len(found) <= 3
    part = local.reshape(-1)[start:stop]
    seen = []
    for piece, offset, pitch in found:
        index = offset + np.arange(piece.rows)[:, None] * pitch + np.arange(piece.cols)
        expected = local[piece.row - 20 : piece.row - 20 + piece.rows, piece.col - 30 : piece.col - 30 + piece.cols]
        np.testing.assert_array_equal(part[index], expected)
        seen += expected.reshape(-1).tolist()
    inside = local[box.row : box.row + box.rows, box.col : box.col + box.cols]
    assert sorted(seen) == sorted(inside[(inside >= start) & (inside < stop)].tolist())


FC1 = ParamSpec("decoder.layers.1.mlp.linear_fc1.weight", (16, 6), 0, (8, 8), layer=1)
TIED = ParamSpec("embedding.word_embeddings.weight", (8, 3), 0, place="pre+post", valid_rows=5)


def test_gate_and_up_are_cut_separately_and_joined_at_tp1():
    two = ShardLayout.training(Mesh(2, 1, 1), 2)
    assert two.holdings(1, [FC1])[FC1.name] == (
        Holding(Box(4, 0, 4, 6), 0, 6), Holding(Box(12, 0, 4, 6), 24, 6),
    )  # fmt: skip
    assert ShardLayout.training(Mesh(1, 1, 1), 2).holdings(0, [FC1])[FC1.name] == (Holding(Box(0, 0, 16, 6), 0, 6),)


def test_row_cut_positions():
    spec = ParamSpec("w", (3, 8), 1, layer=0)
    assert ShardLayout.training(Mesh(4, 1, 1), 1).holdings(2, [spec])["w"] == (Holding(Box(0, 4, 3, 2), 0, 2),)


def test_layers_are_on_their_stage_and_tied_embeddings_on_two():
    layout = ShardLayout.training(Mesh(2, 2, 2), 2)
    assert {s.ranks for s in layout.shards(FC1)} == {(2, 6), (3, 7)}
    first, second = layout.shards(TIED)
    assert first.ranks == (0, 2, 4, 6) and second.ranks == (1, 3, 5, 7)
    generation = ShardLayout.generation(GenMesh(2, (0, 1, 4, 5)), 2)
    assert [s.ranks for s in generation.shards(TIED)] == [(0, 4), (1, 5)]
    assert not generation.holds(TIED, 2) and generation.holdings(2, [TIED]) == {}


def test_padding_rows_are_kept_apart():
    first, second = ShardLayout.training(Mesh(2, 1, 1), 1).shards(TIED)
    assert first.pads == () and first.holdings == (Holding(Box(0, 0, 4, 3), 0, 3),)
    assert second.holdings == (Holding(Box(4, 0, 1, 3), 0, 3),) and second.pads == (Holding(Box(5, 0, 3, 3), 3, 3),)


def test_norms_are_one_shard_with_many_holders():
    norm = ParamSpec("decoder.layers.0.input_layernorm.weight", (6,), None, layer=0)
    layout = ShardLayout.training(Mesh(2, 2, 1), 2)
    (shard,) = layout.shards(norm)
    assert shard.ranks == (0, 1) and shard.holdings == (Holding(Box(0, 0, 6, 1), 0, 1),)
    (atom,) = layout.atoms(norm)
    assert atom.holders == (0, 1)


@pytest.mark.parametrize(
    ("groups", "tp"), [([[1, 0]], 2), ([[0, 1], [1, 2]], 2), ([[0, 1, 2]], 2)], ids=["falling", "twice", "size"]
)
def test_impossible_generation_groups(groups, tp):
    with pytest.raises(LayoutError, match="rising ranks"):
        ShardLayout.replicas(tp, groups, 1)
