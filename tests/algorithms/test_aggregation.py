import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.algorithms.aggregation import MODES, BatchTotals, batch_totals, sample_weights, token_weights


def agg_loss_reference(loss, mask, mode):
    """verl's agg_loss on the whole mini-batch."""
    if mode == "token-mean":
        return (loss * mask).sum() / mask.sum()
    tokens = mask.sum(-1)
    seq_losses = (loss * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        seq_losses = seq_losses / (tokens + 1e-8)
    seq_mask = (tokens > 0).double()
    return (seq_losses * seq_mask).sum() / seq_mask.sum()


def test_token_mean_is_taken_over_the_whole_batch():
    # 100 tokens of loss 2.0 in one micro-batch, 900 of 0.5 in the other: 0.65, not the mean of means 1.25
    weights = sample_weights(torch.tensor([100, 900]))
    total = 100 * weights[0] * 2.0 + 900 * weights[1] * 0.5
    assert abs(float(total) - 0.65) < 1e-12


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
    mode=st.sampled_from(MODES),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_any_split_over_ranks_and_rows_gives_verls_loss(lengths, mode, ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    loss = torch.rand(len(lengths), 6, dtype=torch.float64, generator=generator)
    mask = torch.arange(6) < counts[:, None]
    totals = batch_totals(counts)
    owner = torch.randint(0, ranks, (len(lengths),), generator=generator)
    total = 0.0
    for rank in range(ranks):
        mine = torch.nonzero(owner == rank).flatten()
        if not len(mine):
            continue
        # one packed row with a prompt position before and a pad after each response
        row_mask = torch.cat([torch.cat([torch.tensor([False]), mask[i], torch.tensor([False])]) for i in mine])
        row_loss = torch.cat([torch.nn.functional.pad(loss[i], (1, 1), value=9.0) for i in mine])
        sample_of = torch.arange(len(mine)).repeat_interleave(8)
        sample_of[~row_mask] = -1
        total += float((token_weights(row_mask, sample_of, counts[mine], mode, totals).double() * row_loss).sum())
    assert total == pytest.approx(float(agg_loss_reference(loss, mask.double(), mode)), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_samples_without_tokens_do_not_count_and_an_empty_batch_weighs_nothing(mode):
    assert sample_weights(torch.tensor([0, 0]), mode).tolist() == [0.0, 0.0]
    with_failed = sample_weights(torch.tensor([3, 0, 5]), mode)
    assert with_failed[1] == 0
    assert torch.equal(with_failed[[0, 2]], sample_weights(torch.tensor([3, 5]), mode))


def test_wrong_mode_or_totals_are_named():
    with pytest.raises(ValueError, match="'mean' is unknown"):
        sample_weights(torch.tensor([1]), "mean")
    with pytest.raises(ValueError, match="global totals"):
        sample_weights(torch.tensor([5]), totals=BatchTotals(4, 1))
