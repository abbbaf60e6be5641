"""The stateless noise: fixed bits, right distribution, no correlation between neighbours of any kind."""

import math

import torch
from scipy import stats

from rl3d.generation.noise import log_exponentials, mix, mix_int, sequence_key, vocabulary_keys

CPU = torch.device("cpu")


def exponentials(keys: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    return log_exponentials(torch.tensor(keys), torch.tensor(positions), vocabulary_keys(0, vocab, CPU)).exp().double()


def test_the_hash_is_splitmix64_with_logical_shifts() -> None:
    # first outputs of splitmix64 seeded with 0: Vigna's reference implementation, state advanced by the golden ratio
    golden = 0x9E3779B97F4A7C15
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix_int(golden * i) for i in (1, 2, 3)] == known
    values = [0, 1, -1, 2**62 + 12345, -(2**63), 2**63 - 1]
    assert [v & (2**64 - 1) for v in mix(torch.tensor(values)).tolist()] == [mix_int(v) for v in values]


def test_the_bits_do_not_change_between_versions() -> None:
    """A run that is resumed with a later version must draw the same tokens."""
    assert sequence_key(0, 0, 0, 0) != 0
    assert sequence_key(1, 2, 3, 4) == KEY_1234
    noise = log_exponentials(torch.tensor([KEY_1234]), torch.tensor([17]), vocabulary_keys(100, 103, CPU))
    torch.testing.assert_close(noise[0], torch.tensor(NOISE_100_103), rtol=1e-6, atol=1e-6)


KEY_1234 = -6705884165369200214
NOISE_100_103 = [-0.8469048142433167, 0.7666736841201782, 0.5351331233978271]


def test_keys_tell_every_input_and_their_order_apart() -> None:
    values = [-1, 0, 1, 2, 2**40]
    keys = {sequence_key(a, b, c, d) for a in values for b in values for c in values for d in values}
    assert len(keys) == 5**4
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_noise_is_exponential_over_each_axis() -> None:
    key = sequence_key(0, 0, 0, 0)
    samples = {
        "vocabulary": exponentials([key], [0], 50_000)[0],
        "position": exponentials([key] * 20_000, list(range(20_000)), 1)[:, 0],
        "sample": exponentials([sequence_key(0, 0, 0, i) for i in range(20_000)], [5] * 20_000, 1)[:, 0],
        "prompt": exponentials([sequence_key(0, 0, i, 0) for i in range(20_000)], [5] * 20_000, 1)[:, 0],
        "step": exponentials([sequence_key(0, i, 0, 0) for i in range(20_000)], [5] * 20_000, 1)[:, 0],
        "seed": exponentials([sequence_key(i, 0, 0, 0) for i in range(20_000)], [5] * 20_000, 1)[:, 0],
    }
    for name, x in samples.items():
        assert stats.kstest(x.numpy(), "expon").pvalue > 1e-3, name
        assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 4 / math.sqrt(len(x)), name


def test_rows_positions_and_shards_are_independent() -> None:
    keys = [sequence_key(0, 0, 0, i) for i in range(40)]
    noise = exponentials(keys * 2, [7] * 40 + [8] * 40, 20_000).log()
    correlations = torch.corrcoef(noise).fill_diagonal_(0).abs().max()
    assert correlations < 5.5 / math.sqrt(20_000)
    assert torch.equal(vocabulary_keys(0, 10, CPU)[4:7], vocabulary_keys(4, 7, CPU))


def test_small_values_keep_their_precision() -> None:
    """The smallest of many exponentials decides a draw; 24-bit uniforms would leave 32 distinct values below 2e-6."""
    keys = [sequence_key(9, 0, 0, i) for i in range(400)]
    x = exponentials(keys, [0] * 400, 50_000).flatten()  # 20 million
    small = x[x < 2e-6]
    assert len(small.unique()) == len(small) > 20
    assert stats.kstest(small.numpy(), "uniform", (0, 2e-6)).pvalue > 1e-3
    assert 0 < x.min() and x.max() < 17
