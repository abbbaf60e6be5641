"""What the rows of an update hold for each response token: scores, advantages, masks."""

import torch

from rl3d.algorithms.aggregation import sample_weights
from rl3d.engine.policy import TrainSample, _micro_batch

EOS = 2


def row(samples, indices=None):
    counts = torch.tensor([len(s.response_ids) if s.valid else 0 for s in samples])
    return _micro_batch(samples, sample_weights(counts), list(range(len(samples)) if indices is None else indices))


def test_a_score_sits_on_the_last_token_of_its_response():
    """Not on the first stop token: it may stand in the text, and may be the pad token (transformers#35352, TRL#3750)."""
    samples = [
        TrainSample([1], [10, 11, 12, EOS, 20, 21, 22, 23], score=3.0),
        TrainSample([1, EOS, 4], [5, 6, EOS], score=-1.5),
        TrainSample([7, 8], [EOS], score=2.0),  # a response of the stop token alone
        TrainSample([9], [5, 6], score=4.0),  # cut by the length limit: no stop token
    ]
    batch = row(samples)
    assert batch.counts == (8, 3, 1, 2)
    parts = batch.values["scores"].split(batch.counts)
    for part, sample in zip(parts, samples, strict=True):
        assert part[-1] == sample.score and not part[:-1].any()
    assert batch.values["mask"].all() and len(batch.labels_N) == 14
    assert batch.labels_N.tolist() == [t for s in samples for t in s.response_ids]


def test_a_failed_sample_is_masked_and_weighs_nothing():
    samples = [TrainSample([1], [5, 6], score=1.0), TrainSample([1], [5, 6, 7], valid=False, score=float("nan"))]
    batch = row(samples)
    assert batch.values["mask"].tolist() == [True, True, False, False, False]
    assert batch.values["weights"].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_advantages_of_a_sample_may_differ_by_token_and_rows_may_hold_any_of_them():
    samples = [TrainSample([1, 2], [5, 6], advantage=0.5), TrainSample([1], [7, 8, 9], advantage=[1.0, 2.0, 3.0])]
    assert row(samples).values["advantages"].tolist() == [0.5, 0.5, 1.0, 2.0, 3.0]
    assert row(samples, [1]).values["advantages"].tolist() == [1.0, 2.0, 3.0]
    assert row(samples, []).counts == ()
