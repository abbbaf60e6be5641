import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.data.balancing import pack, pack_shares, seqlen_spread, split_for_dp

lengths_lists = st.lists(st.integers(1, 60), max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 50), st.sampled_from([1, 4, 8]), st.integers(0, 6))
def test_every_sequence_is_in_one_row_and_rows_keep_the_budget(lengths, budget, multiple, at_least):
    rows = pack(lengths, budget, multiple, at_least)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert len(rows) >= at_least
    for row in rows:
        total = sum(lengths[i] for i in row)
        padded = -(-total // multiple) * multiple
        assert len(row) <= 1 or padded <= budget
    assert rows == pack(lengths, budget, multiple, at_least)


def test_rows_are_filled_evenly_and_giants_are_left_alone():
    assert pack([3, 9, 5, 20, 7, 1], 10) == [[3], [1], [4, 5], [0, 2]]  # 20, 9, 8 and 8 tokens
    assert pack([4] * 8, 20) == [[0, 2, 4, 6], [1, 3, 5, 7]], "16 and 16, not 20 and 12"
    # 5, 5 and 4, 3, 3 fill two rows exactly, but the emptiest row first does not find that
    assert [sorted([5, 5, 4, 3, 3][i] for i in row) for row in pack([5, 5, 4, 3, 3], 10)] == [[3, 5], [3, 4], [5]]
    # 2 x 5 tokens fit 10, but not when rows are padded to 8: 16 > 10
    assert pack([5, 5], 10) == [[0, 1]] and pack([5, 5], 10, pad_to_multiple=8) == [[0], [1]]
    assert pack([], 10) == [] and pack([], 10, at_least=1) == [[]]
    assert pack([4, 4], 100, at_least=3) == [[0], [1], []]
    assert pack([2, 2, 2, 2], 100, at_least=2) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        pack([4, 0], 100)
    with pytest.raises(ValueError, match="token_budget=0"):
        pack([4], 0)


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 8))
def test_shares_are_balanced_and_no_rank_is_left_out(lengths, dp):
    shares = split_for_dp(lengths, dp)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    if len(lengths) >= dp:
        assert all(shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    # longest-first leaves no two ranks further apart than one sequence
    assert not lengths or max(loads) - min(loads) <= max(lengths)


def test_longest_first_stays_within_grahams_bound_of_the_optimum():
    # the textbook worst case for two ranks: 7 against an optimum of 6, that is 4/3 - 1/6
    shares = split_for_dp([3, 3, 2, 2, 2], 2)
    assert sorted(sum([3, 3, 2, 2, 2][i] for i in share) for share in shares) == [5, 7]
    # squares weigh: one sequence of 8 costs as much as sixteen of 2 where attention is all there is
    assert split_for_dp([64, *[4] * 16], 2) == [[0], list(range(1, 17))]


@settings(max_examples=60, deadline=None)
@given(lengths_lists.filter(len), st.integers(1, 4), st.integers(8, 80), st.integers(1, 4), st.booleans())
def test_ranks_get_equally_many_rows_where_they_have_the_sequences(lengths, dp, budget, stages, interleaved):
    shares = split_for_dp(lengths, dp)
    rounds = stages if interleaved else 1
    found = pack_shares(lengths, shares, budget, stages=stages, rounds=rounds)
    assert [sorted(i for row in rows for i in row) for rows in found] == shares
    most = max(len(rows) for rows in found)
    for rows, share in zip(found, shares, strict=True):
        assert all(sum(lengths[i] for i in row) <= budget or len(row) == 1 for row in rows)
        assert len(rows) == most or len(rows) >= max(len(share), 1), "fewer rows than the others only for lack of sequences"
        assert len(rows) >= min(stages, len(share))
        assert all(rows) or not share, "no row is empty where there are sequences"


def test_rows_fill_the_rounds_of_an_interleaved_schedule():
    (rows,) = pack_shares([5] * 9, [list(range(9))], 15, stages=2, rounds=2)
    assert len(rows) == 4, "three rows would be filled up with an empty one"
    assert sorted(len(row) for row in rows) == [2, 2, 2, 3]
    assert pack_shares([5, 5], [[0, 1], []], 100) == [[[0, 1]], [[]]]


def test_spread_of_tokens_is_verls():
    """Figures of verl's ``log_seqlen_unbalance``, computed by hand."""
    lengths = [10, 1, 1, 1, 9, 1, 1, 8]
    found = seqlen_spread(lengths, split_for_dp(lengths, 2))
    assert found == {
        "global_seqlen/min": 13, "global_seqlen/max": 19, "global_seqlen/minmax_diff": 6,
        "global_seqlen/balanced_min": 15, "global_seqlen/balanced_max": 17, "global_seqlen/mean": 16,
    }  # fmt: skip


def test_shares_do_not_depend_on_the_order_of_samples():
    random.seed(0)
    lengths = random.sample(range(1, 500), 40)  # all different: the row says which sample it is
    order = random.sample(range(40), 40)
    shuffled = [lengths[i] for i in order]
    for dp in (1, 3, 4):
        plain = pack_shares(lengths, split_for_dp(lengths, dp), 900)
        other = pack_shares(shuffled, split_for_dp(shuffled, dp), 900)
        as_lengths = [[sorted(lengths[i] for i in row) for row in rows] for rows in plain]
        assert as_lengths == [[sorted(shuffled[i] for i in row) for row in rows] for rows in other]
