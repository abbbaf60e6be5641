from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.data.balancing import pack
from rl3d.data.packing import IGNORE, build_row, scatter_values, unpack_values


@dataclass
class Pair:
    prompt_ids: list[int]
    response_ids: list[int]


def test_no_label_crosses_from_one_sequence_to_the_next():
    row = build_row([Pair([10], [11, 12]), Pair([20], [21])], [0, 1])
    assert row.tokens.tolist() == [10, 11, 12, 20, 21]
    assert row.cu_seqlens.tolist() == [0, 3, 5] and row.cu_seqlens.dtype == torch.int32 and row.max_seqlen == 3
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.labels.tolist() == [11, 12, IGNORE, 21, IGNORE]
    assert row.mask.tolist() == [True, True, False, True, False]


def test_only_response_tokens_are_trained_and_padding_belongs_to_nobody():
    samples = [Pair([1, 2, 3], [4, 5]), Pair([6], []), Pair([7, 8], [9])]
    row = build_row(samples, [2, 0, 1], pad_to_multiple=8, pad_token=99)
    assert row.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6, 99, 99, 99, 99, 99, 99, 99]
    assert row.cu_seqlens.tolist() == [0, 3, 8, 9, 16]
    assert row.labels[row.mask].tolist() == [9, 4, 5]
    assert row.sample_of.tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 1, *[-1] * 7]
    assert row.token_of[row.mask].tolist() == [0, 0, 1]
    empty = build_row(samples, [], pad_to_multiple=4)
    assert len(empty.tokens) == 4 and not empty.mask.any() and empty.cu_seqlens.tolist() == [0, 4]
    assert build_row(samples, []).mask.tolist() == [False]
    with pytest.raises(ValueError, match="sample 0 has no prompt token"):
        build_row([Pair([], [1])], [0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=12), st.integers(4, 30))
def test_values_come_back_to_their_samples(shapes, budget):
    samples = [Pair([1] * p, [2] * r) for p, r in shapes]
    values = [[100.0 * i + t for t in range(r)] for i, (_, r) in enumerate(shapes)]
    found = {}
    for indices in pack([p + r for p, r in shapes], budget, 2):
        row = build_row(samples, indices, 2).to("cpu")
        found |= unpack_values(row, scatter_values(row, values))
    assert {i: x.tolist() for i, x in found.items()} == dict(enumerate(values))


def test_values_of_the_wrong_length_are_named():
    row = build_row([Pair([1], [2, 3])], [0])
    with pytest.raises(ValueError, match="sample 0: 1 values for 2 response tokens"):
        scatter_values(row, [[0.5]])
    with pytest.raises(ValueError, match="one entry per token"):
        unpack_values(row, torch.zeros(2))
