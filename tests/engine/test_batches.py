"""Padding and response boundaries of rectangular batches."""

import pytest
import torch

from rl3d.engine.batches import real_tokens, response_spans

PAD = 2


def test_only_the_two_ends_are_padding_when_no_mask_is_given():
    ids = torch.tensor([[2, 2, 5, 2, 6], [7, 8, 2, 2, 2], [5, 6, 7, 8, 9]])
    assert real_tokens(ids, None, PAD) == [[5, 2, 6], [7, 8], [5, 6, 7, 8, 9]]


def test_a_mask_decides():
    ids = torch.tensor([[2, 2, 5, 6]])
    assert real_tokens(ids, torch.tensor([[0, 1, 1, 1]]), PAD) == [[2, 5, 6]]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.tensor([[2, 2]]), None, "nothing but padding"),
        (torch.tensor([1, 2]), None, "expected"),
        (torch.tensor([[1, 5]]), torch.ones(1, 3), "must agree"),
    ],
)
def test_bad_batches_are_named(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        real_tokens(ids, mask, PAD)


def test_responses_from_either_mask():
    sequences = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 7, 2, 2]])
    expected = [[7, 8], [7]]
    assert response_spans(sequences, torch.tensor([[1, 1, 0], [1, 0, 0]])) == expected
    assert response_spans(sequences, torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0]])) == expected
    assert response_spans(sequences, torch.zeros(2, 3)) == [[], []]


def test_a_response_is_one_run():
    with pytest.raises(ValueError, match="row 1 has gaps"):
        response_spans(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 1]]))
    with pytest.raises(ValueError, match="shape"):
        response_spans(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3))
