"""The sampler against exact distributions, Hugging Face's filters and hand-computed values."""

from typing import Any

import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rl3d.generation.noise import sequence_key
from rl3d.generation.sampler import Draw, Sampler, SamplingBatch
from tests.generation.shards import Shards

CPU = torch.device("cpu")
VOCAB = 40


def draw(logits: torch.Tensor, *, temperature: Any = 1.0, top_p: Any = 1.0, top_k: Any = 0, min_p: Any = 0.0,
         vocab: int | None = None, keys: list[int] | None = None) -> Draw:  # fmt: skip
    rows, padded = logits.shape

    def each(value: Any) -> list[Any]:
        return list(value) if isinstance(value, list) else [value] * rows

    keys = keys or [sequence_key(0, 0, 0, i) for i in range(rows)]
    batch = SamplingBatch.build(keys, each(temperature), each(top_p), each(top_k), CPU, each(min_p))
    return Sampler(vocab or padded, padded, None, CPU).draw(logits, batch, torch.zeros(rows, dtype=torch.int64))


def exact(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float = 0.0) -> torch.Tensor:
    """The distribution that transformers would draw from, [V]."""
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits[None].double() / temperature).softmax(-1)[0]


@pytest.mark.parametrize("temperature,top_p,top_k,min_p", [
    (1.0, 1.0, 0, 0), (0.7, 1.0, 0, 0), (1.5, 1.0, 0, 0), (1.0, 1.0, 5, 0), (1.0, 0.8, 0, 0), (1.3, 0.9, 12, 0),
    (1.0, 0.3, 30, 0), (1.0, 0.05, 0, 0), (1.0, 1.0, 1, 0), (1.0, 1.0, 0, 0.1), (1.3, 0.95, 20, 0.05), (1.0, 0.9, 0, 1.0),
])  # fmt: skip
def test_draws_follow_the_exact_distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = exact(logits, temperature, top_p, top_k, min_p)
    count = 40_000
    drawn = draw(logits.expand(count, -1), temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for given, wanted in ((drawn.sampled, expected), (drawn.plain, logits.double().softmax(-1)),
                          (drawn.logprobs, (logits.double() / temperature).softmax(-1))):  # fmt: skip
        torch.testing.assert_close(given.double(), wanted[drawn.tokens].log(), atol=1e-5, rtol=0)
    seen = torch.bincount(drawn.tokens, minlength=VOCAB).double()
    assert (seen[expected == 0] == 0).all()
    used = expected > 0
    if used.sum() > 1:
        assert stats.chisquare(seen[used].numpy(), (expected[used] * count).numpy()).pvalue > 1e-3


def test_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    drawn = draw(torch.zeros(1, 50_000).expand(500, -1)).tokens
    halves = torch.bincount(drawn // 5000, minlength=10)
    assert stats.chisquare(halves.numpy()).pvalue > 1e-3
    assert len(drawn.unique()) > 490


def test_logprobs_are_those_of_the_tempered_distribution_before_filters() -> None:
    """Public fault verl 3133: one side divided the logits by the temperature, the other did not."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature, value in ((0.7, -0.2601), (1.0, -0.4076)):
        only = draw(logits, temperature=temperature, top_k=1)
        assert only.tokens.tolist() == [0]
        assert only.logprobs.item() == pytest.approx(value, abs=5e-5)
    assert draw(logits, temperature=0.0).logprobs.item() == pytest.approx(-0.4076, abs=5e-5)
    assert draw(logits, temperature=0.0).sampled.item() == 0.0
    assert draw(logits, temperature=1.0, top_p=0.1).logprobs.item() == pytest.approx(-0.4076, abs=5e-5)


def test_greedy_takes_the_lowest_of_equals_and_says_that_it_was_close() -> None:
    drawn = draw(torch.tensor([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 2.9, 2.0], [0.0, 3.0, 3.000001, 0.0]]), temperature=0.0)
    assert drawn.tokens.tolist() == [1, 1, 2]
    assert drawn.close.tolist() == [True, False, True]


def test_a_certain_token_is_always_drawn() -> None:
    """Rare extremes of the noise (2 million here) must not draw an entry of no probability."""
    logits = torch.full((50_000, 40), -60.0)
    logits[:, 7] = 0.0
    assert (draw(logits).tokens == 7).all()


def test_padded_vocabulary_rows_are_neither_drawn_nor_counted() -> None:
    logits = torch.zeros(200, 8)
    logits[:, 5:] = 1000.0
    for settings in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 7}):
        drawn = draw(logits, vocab=5, **settings)
        assert int(drawn.tokens.max()) < 5
        torch.testing.assert_close(drawn.logprobs, torch.full((200,), 1 / 5).log())


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)).expand(6, -1)
    keys = [sequence_key(0, 0, 0, 77)] * 6
    temperatures, top_ps, top_ks = [1.0, 0.0, 2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.5, 1.0, 0.1], [0, 0, 0, 0, 3, 3]
    together = draw(logits, temperature=temperatures, top_p=top_ps, top_k=top_ks, keys=keys)
    for i in range(6):
        alone = draw(logits[:1], temperature=temperatures[i], top_p=top_ps[i], top_k=top_ks[i], keys=keys[:1])
        assert alone.tokens[0] == together.tokens[i]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[i])
    assert together.tokens[1] == together.tokens[5] == logits[0].argmax()


def test_a_nucleus_wider_than_the_sorted_head_is_exact() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(6)) * 0.1
    for top_p, top_k in ((0.9, 0), (0.5, 3000), (1.0, 2000), (0.2, 0), (0.1, 3000)):
        allowed = exact(logits, 1.0, top_p, top_k) > 0
        drawn = draw(logits.expand(600, -1), top_p=top_p, top_k=top_k).tokens
        assert allowed[drawn].all()
        # draws reach all of the allowed set, not only its head
        ranks = logits[allowed].argsort(descending=True).argsort()
        index = torch.full((5000,), -1)
        index[allowed] = ranks
        assert int(index[drawn].max()) > 0.9 * int(allowed.sum())


@pytest.mark.parametrize("head", [1024, 16])
@pytest.mark.parametrize("padded", [264, 400])
def test_shards_agree_on_what_a_filter_leaves(monkeypatch: pytest.MonkeyPatch, head: int, padded: int) -> None:
    """Three shards, the last one padding in part or in whole; by their largest entries, and by bisection (head 16)."""
    monkeypatch.setattr("rl3d.generation.filters._HEAD", head)
    vocab, rows = 257, 60
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(9)) * 2
    logits[7:9] = logits[7:9].round()  # many ties
    logits[9, 5:] = float("-inf")
    cases = [(0.7, 1.0, 30, 0.0), (1.0, 0.99, 0, 0.0), (1.5, 0.9, 100, 0.0), (1.0, 0.3, 0, 0.02), (0.0, 0.5, 3, 0.0),
             (1.0, 1.0, 0, 0.0), (1.0, 1e-6, 0, 0.0), (1.2, 0.97, 256, 0.0), (1.0, 1.0, 1, 0.0),
             (2.0, 0.99, 0, 0.01)]  # fmt: skip
    columns = [list(c) for c in zip(*[cases[i % len(cases)] for i in range(rows)], strict=True)]
    whole = draw(logits, temperature=columns[0], top_p=columns[1], top_k=columns[2], min_p=columns[3])
    shards = Shards(3)
    wide = torch.nn.functional.pad(logits, (0, padded - vocab), value=50.0)
    batch = SamplingBatch.build([sequence_key(0, 0, 0, i) for i in range(rows)], *columns[:3], CPU, columns[3])
    for found in shards.draw(wide, vocab, batch):
        assert torch.equal(found.tokens, whole.tokens) and torch.equal(found.close, whole.close)
        for name in ("logprobs", "sampled", "plain"):
            torch.testing.assert_close(getattr(found, name), getattr(whole, name), atol=2e-6, rtol=0)
    assert shards.widest <= max(3 * head, 10)  # numbers of a row that any rank got at once: never the vocabulary
    for i, (temperature, top_p, top_k, min_p) in enumerate(cases):
        if temperature and i not in (7, 8):  # transformers breaks ties
            allowed = exact(logits[i], temperature, top_p, top_k, min_p)
            torch.testing.assert_close(whole.sampled[i].double(), allowed[whole.tokens[i]].log(), atol=1e-5, rtol=0)


def test_a_draw_that_hangs_on_the_edge_of_the_nucleus_counts_as_close() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2]]).log()
    rows = probabilities.expand(400, -1)
    at_edge = draw(rows, top_p=0.800001)  # the third entry is in by 1e-6
    assert set(at_edge.tokens.tolist()) == {0, 1, 2}
    assert torch.equal(at_edge.close, at_edge.tokens == 2)
    inside = draw(rows, top_p=0.9)
    assert torch.equal(inside.tokens, at_edge.tokens) and not inside.close.any()


def test_low_precision_logits_are_computed_in_fp32() -> None:
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(8)).bfloat16()
    low, full = draw(logits), draw(logits.float())
    assert torch.equal(low.tokens, full.tokens) and torch.equal(low.logprobs, full.logprobs)
    assert low.logprobs.dtype == torch.float32


def test_the_logits_given_are_left_alone() -> None:
    logits = torch.randn(4, VOCAB)
    copy = logits.clone()
    for settings in ({"temperature": 0.0}, {}, {"top_p": 0.5, "top_k": 4}):
        draw(logits, **settings)
    assert torch.equal(logits, copy)
