"""Boxes, atoms and shard layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.layout import Box, GenMesh, Holding, LayoutError, Mesh, ParamSpec, ShardLayout, cut_atoms, split_box


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(boxes(), st.lists(boxes(), max_size=4))
def test_atoms_cover_once_and_have_one_set_of_holders(need, held):
    atoms = cut_atoms(need, [[Holding(b, 100 * i, 9)] for i, b in enumerate(held)])
    assert sum((_mask(box) for box, _ in atoms), np.zeros((9, 9), int)).tolist() == _mask(need).tolist()
    for box, owners in atoms:
        assert {i for i, _ in owners} == {i for i, b in enumerate(held) if _mask(b)[box.row, box.col]}
        for i, b in enumerate(held):
            assert (_mask(b) * _mask(box)).sum() in (0, box.numel), i


def test_equal_neighbours_are_one_atom():
    assert len(cut_atoms(Box(0, 0, 9, 9), [[Holding(Box(0, 0, 9, 9), 0, 9)]])) == 1
    thirds = [[Holding(Box(0, c, 9, 3), 0, 3)] for c in (0, 3, 6)]
    assert [box for box, _ in cut_atoms(Box(0, 0, 9, 6), thirds)] == [Box(0, 0, 9, 3), Box(0, 3, 9, 3)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(boxes(), st.integers(1, 90))
def test_pieces_of_a_box_fit_and_cover(box, limit):
    pieces = split_box(box, limit)
    assert all(p.numel <= limit for p in pieces)
    assert sum((_mask(p) for p in pieces), np.zeros((9, 9), int)).tolist() == _mask(box).tolist()


def test_flat_intervals_of_a_shard_are_holdings():
    """What ZeRO partitions need: an interval of the flat shard is a few boxes whose positions are in the interval."""
    local = np.arange(12 * 5).reshape(12, 5)
    start, interval = 7, local.reshape(-1)[7:41]
    holdings = [Holding(Box(1, 2, 1, 3), 0, 5), Holding(Box(2, 0, 6, 5), 3, 5), Holding(Box(8, 0, 1, 1), 33, 5)]
    for need in (Box(0, 1, 12, 2), Box(3, 0, 2, 5), Box(8, 0, 2, 2)):
        for box, owners in cut_atoms(need, [holdings]):
            for _, held in owners:
                at = held.locate(box)
                index = at + np.arange(box.rows)[:, None] * held.pitch + np.arange(box.cols)
                expected = local[box.row : box.row + box.rows, box.col : box.col + box.cols]
                assert (interval[index] == expected).all() and index.max() + start < local.size


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
