"""Pages and the scheduler by themselves: a made-up model whose next token is a hash of all tokens that it can see."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.generation.engine import Request, SamplingParams
from rl3d.generation.pages import PagePool, page_hashes
from rl3d.generation.scheduler import Chunk, RunningSequence, Scheduler, expand

VOCAB = 50
UNUSED = (False, 0.0, 0.0, 0.0)


def next_token(tokens: list[int], key: int) -> int:
    return hash((tuple(tokens), key)) % VOCAB


class Machine:
    """Computes what the scheduler plans on pages that remember tokens instead of keys and values."""

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.size = pool, pool.page_size
        self.memory: dict[int, list[int | None]] = {p: [None] * self.size for p in range(pool.pages + 1)}

    def run(self, scheduler: Scheduler, each_step: Callable[[int], None] = lambda step: None) -> None:
        step = 0
        while scheduler.unfinished:
            chunks = scheduler.plan_prefill()
            if chunks:
                assert sum(len(c.tokens) for c in chunks) <= scheduler.max_prefill_tokens
                for chunk in chunks:
                    self.write(chunk.sequence, chunk.start, chunk.tokens)
                drawing, _ = scheduler.start_decoding([c for c in chunks if c.last])
            else:
                room = scheduler.plan_decode()
                old = {source: list(self.memory[source]) for source in room.copies.values()}
                for target, source in room.copies.items():
                    self.memory[target] = list(old[source])
                drawing = list(scheduler.running)
                for sequence in drawing:
                    assert sequence.computed == sequence.length
                    self.write(sequence, sequence.length - 1, [sequence.tokens[-1]])
            assert drawing or chunks
            assert len(scheduler.running) + len(scheduler.prefilling) <= scheduler.max_sequences
            ended = [s for s in drawing if s.accept(next_token(self.read(s), s.noise_key), *UNUSED)]
            scheduler.counts.drawn += len(drawing)
            scheduler.retire(ended)
            each_step(step)
            step += 1

    def write(self, sequence: RunningSequence, start: int, tokens: list[int]) -> None:
        for at, token in enumerate(tokens, start):
            self.memory[sequence.pages[at // self.size]][at % self.size] = token

    def read(self, sequence: RunningSequence) -> list[int]:
        seen = [self.memory[sequence.pages[i // self.size]][i % self.size] for i in range(sequence.length)]
        assert seen == sequence.tokens  # every token the sequence attends to is its own, in its place
        return sequence.tokens


def alone(request: Request) -> list[list[int]]:
    """What each sample is, without any scheduler."""
    out = []
    for sequence in expand([request]):
        while sequence.params.max_new_tokens:
            if sequence.accept(next_token(sequence.tokens, sequence.noise_key), *UNUSED):
                break
        out.append(sequence.result.token_ids)
    return out


requests_strategy = st.lists(
    st.builds(
        lambda head, tail, new, n, stop: Request([7] * head + tail, SamplingParams(new, n=n, stop_token_ids=stop)),
        st.integers(0, 12),  # many prompts begin alike
        st.lists(st.integers(0, 3), min_size=1, max_size=9),
        st.integers(1, 14),
        st.integers(1, 4),
        st.sampled_from([(), (5, 9, 11, 30, 31, 32)]),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(requests_strategy, st.integers(1, 6), st.integers(1, 5), st.integers(1, 20), st.integers(0, 12), st.booleans())
def test_every_schedule_gives_the_same_tokens(
    requests: list[Request], slots: int, page: int, chunk: int, spare: int, share: bool
) -> None:
    longest = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests)
    pool = PagePool(-(-longest // page) + spare, page)
    machine = Machine(pool)
    for _ in range(2):  # the second call finds pages of the first
        sequences = expand(requests)
        scheduler = Scheduler(sequences, pool, max_sequences=slots, max_prefill_tokens=chunk, share_prefixes=share)
        machine.run(scheduler)
        expected = [tokens for r in requests for tokens in alone(r)]
        assert [s.result.token_ids for s in sequences] == expected
        assert pool.available == pool.pages  # all pages came back


def schedule(requests: list[Request], pages: int = 100, **options: int) -> Scheduler:
    scheduler = Scheduler(expand(requests), PagePool(pages, 4), **{"max_sequences": 8, "max_prefill_tokens": 64, **options})
    Machine(scheduler.pool).run(scheduler)
    return scheduler


def test_prompts_join_a_running_batch_several_at_once() -> None:
    def prefills(slots: int) -> tuple[int, list[int]]:
        requests = [Request([i, 3], SamplingParams(5 + i % 29)) for i in range(160)]
        scheduler = Scheduler(expand(requests), PagePool(4000, 4), max_sequences=slots, max_prefill_tokens=10_000)
        plan, joined = scheduler.plan_prefill, []

        def counted() -> list[Chunk]:
            chunks = plan()
            joined.append(len(chunks))
            return chunks

        scheduler.plan_prefill = counted  # type: ignore[method-assign]
        Machine(scheduler.pool).run(scheduler)
        found = [n for n in joined if n]
        return sum(found), found

    whole, joined = prefills(64)
    assert whole == 160 and joined[0] == 64 and min(joined[1:-1]) >= 4
    whole, joined = prefills(8)
    assert whole == 160 and 1 in joined[1:], "a few places are not left free"


def test_samples_of_a_prompt_compute_it_once_and_share_full_pages() -> None:
    scheduler = Scheduler(expand([Request(list(range(10)), SamplingParams(3, n=5))]), PagePool(40, 4), max_sequences=8,
                          max_prefill_tokens=64)  # fmt: skip
    scheduler.start_decoding(scheduler.plan_prefill())
    assert scheduler.counts.prefilled == 10 and scheduler.counts.reused == 4 * 10
    assert {tuple(s.pages) for s in scheduler.running} == {tuple(scheduler.running[0].pages)}
    for sequence in scheduler.running:
        sequence.accept(1, *UNUSED)
    room = scheduler.plan_decode()
    assert len(room.copies) == 4  # the last of five keeps the original
    assert len({s.pages[2] for s in scheduler.running}) == 5 and len({tuple(s.pages[:2]) for s in scheduler.running}) == 1


def test_a_prompt_seen_before_is_computed_from_its_last_page_only_until_the_weights_change() -> None:
    pool = PagePool(40, 4)
    machine = Machine(pool)

    def prefilled() -> int:
        scheduler = Scheduler(expand([Request(list(range(12)), SamplingParams(2))]), pool, max_sequences=2,
                              max_prefill_tokens=64)  # fmt: skip
        machine.run(scheduler)
        return scheduler.counts.prefilled

    assert [prefilled(), prefilled()] == [12, 4]
    pool.forget()
    assert prefilled() == 12


def test_pages_longest_unused_are_given_up_first_and_ends_before_beginnings() -> None:
    pool = PagePool(4, 2)
    first, second = page_hashes([1, 2, 3, 4], 2, 2), page_hashes([5, 6, 7, 8], 2, 2)
    for hashes in (first, second):
        pages = [pool.allocate(), pool.allocate()]
        for page, value in zip(pages, hashes):
            pool.publish(page, value)
        pool.release(pages)
    pool.allocate()
    assert (len(pool.find(first)), len(pool.find(second))) == (1, 2)
    pool.allocate()
    assert (len(pool.find(first)), len(pool.find(second))) == (0, 2)
    pool.retain(pool.find(second))
    with pytest.raises(IndexError, match="no page"):
        pool.allocate()


def test_equal_pages_after_different_beginnings_are_different() -> None:
    assert page_hashes([1, 2, 9, 9], 2, 2)[1] != page_hashes([3, 4, 9, 9], 2, 2)[1]


def test_too_few_pages_make_the_youngest_give_way() -> None:
    requests = [Request([i] * 6, SamplingParams(10)) for i in range(4)]
    scheduler = schedule(requests, pages=8)
    assert scheduler.counts.preempted > 0
    assert schedule(requests).counts.preempted == 0


def test_an_aborted_leader_leaves_its_followers_to_compute_the_prompt() -> None:
    requests = [Request([3] * 20, SamplingParams(4), request_id=name) for name in ("a", "b", "c")]
    sequences = expand(requests)
    scheduler = Scheduler(sequences, PagePool(30, 4), max_sequences=4, max_prefill_tokens=8)
    scheduler.plan_prefill()  # "a" has begun; a prompt of 20 takes three steps
    scheduler.plan_prefill()
    assert [s.result.request_id for s in scheduler.abort(lambda s: s.result.request_id == "a")] == ["a"]
    machine = Machine(scheduler.pool)
    scheduler.pool.forget()  # the machine has not computed the two steps above
    machine.run(scheduler)
    assert [len(s.result.token_ids) for s in sequences] == [0, 4, 4] and scheduler.pool.available == 30
