"""What one engine does with a request: stops, limits, errors, memory and versions (one process, TP = 1)."""

from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl3d.generation.engine import GenerationError, Progress, Request, Result, SamplingParams
from tests.generation.models import MAX_LENGTH, VOCAB, build_engine, save_llama

GREEDY = SamplingParams(20, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "tied", tied=True)


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    from rl3d.distributed import bootstrap
    from rl3d.distributed.groups import GroupRegistry, generation_groups

    torch.set_num_threads(1)
    runtime = bootstrap.init(timeout_s=60, device="cpu")
    yield generation_groups([(0,)], GroupRegistry(60))
    runtime.shutdown()


@pytest.fixture(scope="module")
def engine(model: Path, groups: Any) -> Any:
    return build_engine(str(model), groups)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model).eval()


PROMPT = [5, 17, 101, 42, 2, 9]  # the end-of-sequence token inside a prompt stops nothing


def hf(reference: Any, prompt: list[int], count: int, stops: list[int] | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=stops,
        pad_token_id=2,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


LOGPROBS = ("logprobs", "sampled_logprobs", "plain_logprobs")


def without_numbers(result: Result) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name not in LOGPROBS}


def test_both_engines_draw_the_same(engine: Any, reference: Any) -> None:
    """transformers' own generate, padded batches and all, with the draws on its logits: same tokens, same numbers."""
    from rl3d.generation import HFGenerator

    prompts = [[3 + i] * (1 + 4 * i) + PROMPT for i in range(5)]
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 9, "min_p": 0.05}, {"temperature": 0.0},
        {"stop_token_ids": tuple(range(60))},
    ]  # fmt: skip
    requests = [
        Request(p, SamplingParams(n, n=2, seed=5, **s), (1, i, 0))
        for i, (p, n, s) in enumerate(zip(prompts, [12, 20, 0, 15, 30], settings, strict=True))
    ]
    seen: list[Result] = []
    ours, theirs = engine.generate(requests), HFGenerator(reference, max_sequences=4).generate(requests, seen.append)
    assert [without_numbers(r) for r in ours] == [without_numbers(r) for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in LOGPROBS:
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-5)
    assert len(seen) == 10 and "stop" in {r.finish_reason for r in ours}


def test_several_stop_tokens_end_a_sequence_as_in_transformers(engine: Any, reference: Any) -> None:
    free = hf(reference, PROMPT, 20)
    first = {token: i for i, token in reversed(list(enumerate(free)))}
    late, later = sorted((t for t in first if first[t] >= 4), key=first.__getitem__)[:2]
    requests = [
        Request(PROMPT, SamplingParams(20, temperature=0.0, stop_token_ids=stops))
        for stops in ((later, late), (later,), (free[0],), ())
    ]
    results = engine.generate(requests)
    for request, result in zip(requests, results):
        stops = list(request.params.stop_token_ids)
        assert result.token_ids == hf(reference, PROMPT, 20, stops or None)
        assert result.finish_reason == ("stop" if stops else "length")
        assert len(result.logprobs) == len(result.token_ids)
    assert [len(r.token_ids) for r in results[:3]] == [first[late] + 1, first[later] + 1, 1]


def test_zero_and_one_new_token(engine: Any, reference: Any) -> None:
    seen: list[Result] = []
    requests = [Request(PROMPT, SamplingParams(n, temperature=0.0)) for n in (0, 1, 3)]
    results = engine.generate(requests, seen.append)
    assert [r.token_ids for r in results] == [hf(reference, PROMPT, 3)[:n] for n in (0, 1, 3)]
    assert results[0].logprobs == [] and results[0].finish_reason == "length"
    assert [r.request_index for r in seen] == [0, 1, 2]
    assert engine.generate([]) == []


def test_results_stream_while_others_still_run(engine: Any) -> None:
    seen: list[tuple[int, int]] = []
    progress: list[Progress] = []
    requests = [Request([3 + i], SamplingParams(2 + 9 * (i % 2), temperature=0.0)) for i in range(7)]
    engine.generate(requests, lambda r: seen.append((r.request_index, len(progress))), progress.append)
    assert sorted(i for i, _ in seen) == list(range(7))
    assert dict(seen)[0] < dict(seen)[1]
    assert progress[-1] == Progress(waiting=0, running=0, finished=7, tokens=4 * 2 + 3 * 11)
    assert max(p.running for p in progress) <= 4 and progress[0].waiting == 3


def test_a_whole_window_is_usable_and_one_more_is_refused(engine: Any, reference: Any) -> None:
    prompt = [7] * (MAX_LENGTH - 5)
    assert engine.generate([Request(prompt, SamplingParams(5, temperature=0.0))])[0].token_ids == hf(reference, prompt, 5)
    with pytest.raises(GenerationError, match=rf"request 1 .*{MAX_LENGTH - 5} tokens.*max_new_tokens 6.*{MAX_LENGTH}"):
        engine.generate([Request([3], GREEDY), Request(prompt, SamplingParams(6))])


def test_a_request_larger_than_the_pool_is_refused(model: Path, groups: Any) -> None:
    small = build_engine(str(model), groups, page_size=8, pages=4)
    with pytest.raises(GenerationError, match="needs 5 pages of 8 tokens, the pool has 4"):
        small.generate([Request([3] * 20, SamplingParams(13))])
    assert len(small.generate([Request([3] * 20, SamplingParams(12))] * 5)) == 5


@pytest.mark.parametrize(
    "request_,message",
    [
        (Request([], GREEDY), "request 0 .*prompt is empty"),
        (Request([3, VOCAB], GREEDY), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        (Request([-1], GREEDY), "token -1 is outside"),
    ],
)
def test_impossible_prompts_name_themselves(engine: Any, request_: Request, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        engine.generate([request_])


@pytest.mark.parametrize("field,value", [
    ("max_new_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5),
    ("top_k", -1), ("min_p", 1.5), ("n", 0), ("seed", 1 << 63),
])  # fmt: skip
def test_impossible_parameters_name_themselves(field: str, value: Any) -> None:
    with pytest.raises(GenerationError, match=f"{field} = {value}"):
        SamplingParams(**{"max_new_tokens": 4, field: value})


def test_noise_follows_seed_step_prompt_and_sample(engine: Any) -> None:
    def tokens(seed: int, key: tuple[int, int, int], n: int = 1) -> list[tuple[int, ...]]:
        results = engine.generate([Request(PROMPT, SamplingParams(16, n=n, seed=seed), key)])
        return [tuple(r.token_ids) for r in results]

    base = tokens(0, (0, 0, 0))
    assert tokens(0, (0, 0, 0)) == base
    others = [tokens(1, (0, 0, 0)), tokens(0, (1, 0, 0)), tokens(0, (0, 1, 0)), tokens(0, (0, 0, 1))]
    assert len({t for run in [base, *others] for t in run}) == 5
    assert tokens(0, (0, 0, 0), n=3) == [*base, *tokens(0, (0, 0, 1)), *tokens(0, (0, 0, 2))]


def test_a_continued_sequence_draws_what_it_would_have_drawn(engine: Any) -> None:
    whole = engine.generate([Request(PROMPT, SamplingParams(16))])[0].token_ids
    rest = engine.generate([Request(PROMPT + whole[:6], SamplingParams(10))])[0].token_ids
    assert whole[6:] == rest


def cache_of(pages: int) -> int:
    """So many pages: of 3 layers, keys and values, each 16 tokens, 4 heads, 8 dims of fp32 and mapped by itself."""
    return 3 * 2 * -(-pages * 16 * 4 * 8 * 4 // PAGESIZE) * PAGESIZE


def test_the_cache_has_the_size_of_the_batch_and_can_be_released(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups)
    assert engine.allocate_cache() == 0 == engine.cache_bytes  # nothing is known of what will come
    before = engine.generate([Request(PROMPT, GREEDY)])[0].token_ids  # 26 tokens, two pages and scratch
    assert engine.cache_bytes == cache_of(3)
    engine.generate([Request(PROMPT, SamplingParams(4, n=9))])  # four slots of one page
    assert engine.cache_bytes == cache_of(5)
    assert engine.release_cache() == cache_of(5) and engine.cache_bytes == 0 and engine.release_cache() == 0
    assert engine.allocate_cache() == cache_of(5) and engine.allocate_cache() == 0
    engine.release_cache()
    assert engine.generate([Request(PROMPT, GREEDY)])[0].token_ids == before


def test_cache_strategies_differ_in_memory_and_not_in_results(model: Path, groups: Any) -> None:
    requests = [Request(PROMPT, SamplingParams(40, n=2, seed=4), (0, i, 0)) for i in range(3)]
    full, light, usual = (build_engine(str(model), groups, cache_strategy=s) for s in ("full", "lightweight", "adaptive"))
    assert full.allocate_cache() == cache_of(4 * MAX_LENGTH // 16 + 1)
    during: list[int] = []
    tokens = [[r.token_ids for r in engine.generate(requests)] for engine in (full, usual)]
    results = light.generate(requests, on_step=lambda _: during.append(light.cache_bytes))
    assert tokens[0] == tokens[1] == [r.token_ids for r in results]
    # 46 tokens take three pages; four slots twelve, a quarter of that three
    assert usual.cache_bytes == cache_of(13) and set(during) == {cache_of(4)} and light.counts.preempted > 0
    assert (full.release_cache(), light.release_cache(), usual.release_cache()) == (0, 0, cache_of(13))
    assert light.cache_bytes == 0 and full.cache_bytes == cache_of(25)
    with pytest.raises(ValueError, match="cache_strategy = 'most', expected one of full"):
        build_engine(str(model), groups, cache_strategy="most")


def test_a_larger_batch_has_more_pages_and_finds_the_prompts_of_the_one_before(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups)
    prompt = list(range(3, 43))  # two pages of 16 and a half
    few, many = (Request(prompt, SamplingParams(4, n=n), (0, n, 0)) for n in (1, 4))
    engine.generate([few])
    assert (engine.pool.pages, engine.cache_bytes, engine.counts.prefilled) == (3, cache_of(4), 40)
    grown = engine.generate([many])
    assert (engine.pool.pages, engine.cache_bytes, engine.counts.prefilled) == (12, cache_of(13), 8)
    assert [r.token_ids for r in grown] == [r.token_ids for r in build_engine(str(model), groups).generate([many])]
    assert engine.pool.available == 12 and len({engine.pool.allocate() for _ in range(12)}) == 12


def test_a_pool_that_memory_limits_is_kept_and_gives_way(model: Path, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(str(model), groups)
    monkeypatch.setattr("rl3d.generation.provision.affordable_pages", lambda *_: 8)
    requests = [Request(PROMPT, SamplingParams(40, n=2, seed=4), (0, i, 0)) for i in range(2)]
    expected = [r.token_ids for r in build_engine(str(model), groups, pages=40).generate(requests)]
    for _ in range(2):
        assert [r.token_ids for r in engine.generate(requests)] == expected
        assert engine.pool.pages == 7 and engine.cache.epoch == 1 and engine.counts.preempted > 0
    with pytest.raises(GenerationError, match="gets 1 pages of 16 tokens .*longest sequence needs 6"):
        monkeypatch.setattr("rl3d.generation.provision.affordable_pages", lambda *_: 2)
        engine.release_cache()
        engine.generate([Request(PROMPT, SamplingParams(90))])


def test_pages_are_returned_even_when_a_callback_fails(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups, page_size=8)

    def fail(_: Result) -> None:
        raise KeyError("reward")

    with pytest.raises(KeyError):
        engine.generate([Request([3 + i], SamplingParams(2 + i)) for i in range(6)], fail)
    assert engine.pool.available == engine.pool.pages > 0


def test_the_body_can_be_chosen(model: Path, groups: Any, engine: Any) -> None:
    from rl3d.generation.body import MegatronBody
    from rl3d.generation.lean import LeanBody

    modules = build_engine(str(model), groups, body="megatron")
    assert isinstance(modules.body, MegatronBody) and isinstance(engine.body, LeanBody)
    request = Request(PROMPT, SamplingParams(30, n=3))
    for a, b in zip(modules.generate([request]), engine.generate([request]), strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    with pytest.raises(ValueError, match="body 'triton': expected"):
        build_engine(str(model), groups, body="triton")


def test_a_model_that_the_lean_body_does_not_know_is_named(model: Path, groups: Any) -> None:
    from rl3d.generation.body import make_body

    engine = build_engine(str(model), groups)
    engine.model.config.fp32_residual_connection = True
    with pytest.raises(ValueError, match="fp32_residual_connection = True, expected False"):
        make_body(engine.model, engine.context, None, "lean")


def test_impossible_limits_are_refused(model: Path, groups: Any) -> None:
    with pytest.raises(ValueError, match="max_sequence_length 257 exceeds the 256 positions"):
        build_engine(str(model), groups, max_sequence_length=257)
    with pytest.raises(ValueError, match="max_sequences = 0"):
        build_engine(str(model), groups, max_sequences=0)


def test_stale_or_missing_weights_are_refused_and_new_ones_are_seen(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups)
    old = engine.generate([Request(PROMPT, GREEDY)])[0].token_ids
    engine.expected_version = 1
    with pytest.raises(RuntimeError, match="version 0, expected 1"):
        engine.generate([Request(PROMPT, GREEDY)])
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    engine.weights_version = 1
    assert engine.generate([Request(PROMPT, GREEDY)])[0].token_ids != old
    engine.weights_version = None
    with pytest.raises(RuntimeError, match="never loaded"):
        engine.generate([Request(PROMPT, GREEDY)])


def test_logits_that_are_not_numbers_are_an_error(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups)
    before = engine.generate([Request(PROMPT, GREEDY)])[0].token_ids
    weight = engine.model.decoder.layers[0].input_layernorm.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="request 0"):
        engine.generate([Request(PROMPT * 8, SamplingParams(3))])
    with torch.no_grad():
        weight.copy_(good)
    assert engine.generate([Request(PROMPT, GREEDY)])[0].token_ids == before  # the cache kept none of it


def test_prefixes_are_found_again_until_the_weights_change(model: Path, groups: Any) -> None:
    engine = build_engine(str(model), groups, page_size=4, max_sequences=9)
    requests = [Request(PROMPT * 4 + [11 + i], SamplingParams(8, n=3, seed=2), (0, i, 0)) for i in range(3)]
    plain = build_engine(str(model), groups, page_size=4, share_prefixes=False).generate(requests)
    first = engine.generate(requests)
    assert (engine.counts.prefilled, engine.counts.reused) == (25 + 1 + 1, 2 * 24 + 3 * 2 * 25)
    again = engine.generate(requests)
    assert engine.counts.prefilled == 3
    assert [r.token_ids for r in plain] == [r.token_ids for r in first] == [r.token_ids for r in again]
    for a, b in zip(plain, again, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    engine.weights_version = 1
    engine.generate(requests)
    assert engine.counts.prefilled == 27


def test_sequences_that_gave_way_are_continued_as_if_they_had_not(model: Path, groups: Any) -> None:
    requests = [Request(PROMPT + [20 + i], SamplingParams(30, n=2, seed=3), (0, i, 0)) for i in range(4)]
    roomy = build_engine(str(model), groups, max_sequences=8, page_size=4)
    tight = build_engine(str(model), groups, max_sequences=8, page_size=4, pages=24)
    expected, results = roomy.generate(requests), tight.generate(requests)
    assert roomy.counts.preempted == 0 and tight.counts.preempted >= 3
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    for a, b in zip(results, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert tight.pool.available == 24


def test_a_request_can_be_aborted_from_a_callback(engine: Any) -> None:
    requests = [Request(PROMPT, SamplingParams(12, n=2), request_id=name) for name in ("keep", "cut", "late", "wait")]
    whole = engine.generate(requests)
    seen: list[str] = []

    def step(progress: Progress) -> None:
        if progress.tokens == 12:  # the four slots hold "keep" and "cut"; the others wait
            engine.abort("cut")
            engine.abort("wait")
            engine.abort("unknown")

    results = engine.generate(requests, lambda r: seen.append(r.request_id), step)
    assert [r.finish_reason for r in results] == ["length"] * 2 + ["abort"] * 2 + ["length"] * 2 + ["abort"] * 2
    assert [len(r.token_ids) for r in results] == [12, 12, 3, 3, 12, 12, 0, 0]
    assert all(w.token_ids[: len(r.token_ids)] == r.token_ids for w, r in zip(whole, results))
    assert sorted(seen) == sorted(r.request_id for r in results) and engine.pool.available == engine.pool.pages


def test_two_requests_of_one_name_are_refused(engine: Any) -> None:
    with pytest.raises(GenerationError, match="request 1 .*'a' was given twice"):
        engine.generate([Request(PROMPT, GREEDY, request_id="a")] * 2)


def test_fused_steps_run_ahead_of_the_host_and_change_nothing(model: Path, groups: Any) -> None:
    stops = [(), tuple(range(3, 40))]
    requests = [Request(PROMPT + [3 + i], SamplingParams(20 + i, seed=5, stop_token_ids=stops[i % 2]), (0, i, 0), str(i))
                for i in range(9)]  # fmt: skip
    plain = build_engine(str(model), groups, max_sequences=8).generate(requests)
    fused = build_engine(str(model), groups, max_sequences=8, page_size=4, pages=24, fused=True)
    steps, started, read = fused.runner.step, [], []

    def start(longest: int) -> Any:
        started.append(len(read))
        return steps(longest)

    fused.runner.step = start
    results = fused.generate(requests, on_step=lambda progress: read.append(progress.tokens))
    assert fused.counts.preempted > 0 and fused.pool.available == 24
    assert len(started) > len(set(started)), "a second step was started before the first one's draw was read"
    assert [(r.token_ids, r.finish_reason) for r in results] == [(r.token_ids, r.finish_reason) for r in plain]
    assert {r.finish_reason for r in results} == {"stop", "length"}

    def cut(progress: Progress) -> None:
        if progress.tokens > 30:
            fused.abort("2")

    aborted = fused.generate(requests, on_step=cut)
    assert aborted[2].finish_reason == "abort" and fused.pool.available == 24
    for a, b in zip(aborted, plain, strict=True):
        assert a.token_ids == b.token_ids[: len(a.token_ids)]
        assert a.finish_reason == "abort" or a.token_ids == b.token_ids
    fused.model.decoder.layers[1].input_layernorm.late_rounding = True
    settings = {"max_sequences": 2, "max_sequence_length": MAX_LENGTH, "device": "cpu", "dtype": torch.float32}
    with pytest.raises(ValueError, match="fused decoding cannot compute this model: the norm before attention"):
        type(fused)(fused.model, None, VOCAB, fused=True, **settings)


def test_sequences_that_end_leave_the_batch_as_it_is(model: Path, groups: Any) -> None:
    """Rows of ended sequences pad it, until a bucket of fewer rows will do or others join."""
    requests = [Request(PROMPT + [3 + i], SamplingParams(60, seed=7, stop_token_ids=tuple(range(3, 9))), (0, i, 0), str(i))
                for i in range(30)]  # fmt: skip
    plain, fused = (build_engine(str(model), groups, max_sequences=24, fused=on) for on in (False, True))
    expected, results = plain.generate(requests), fused.generate(requests)
    assert [(r.token_ids, r.finish_reason) for r in results] == [(r.token_ids, r.finish_reason) for r in expected]
    for mine, right in zip(results, expected, strict=True):
        assert mine.logprobs == pytest.approx(right.logprobs, abs=1e-5)
    assert fused.counts.drawn == plain.counts.drawn == sum(len(r.token_ids) for r in results)
    lengths = {len(r.token_ids) for r in results}
    assert len(lengths) > 15, "they ended at different steps"
    joined = 6  # prompts that waited for a place
    buckets = (24, 16, 8, 4, 2, 1)
    assert fused.counts.batches <= joined + len(buckets) < plain.counts.batches
    assert fused.pool.available == fused.pool.pages


class Letters:
    """A tokenizer of one or two characters a token."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) * (1 + i % 2) for i in ids)


def test_stop_texts_end_a_response_however_they_fall_into_tokens(engine: Any, reference: Any) -> None:
    from rl3d.generation import HFGenerator

    letters, free = Letters(), hf(reference, PROMPT, 20)
    text = letters.decode(free)
    across = letters.decode(free[5:8])[1:]  # begins inside a token, ends with another
    requests = [
        Request(PROMPT, SamplingParams(20, temperature=0.0, stop=stop))
        for stop in ((across,), ("never", across, text[-2:]), ("never",), ())
    ]
    with pytest.raises(GenerationError, match=r"request 0 .*stop = .*set the engine's tokenizer"):
        engine.generate(requests)
    for name, generator in {"ours": engine, "hf": HFGenerator(reference, max_sequences=4)}.items():
        generator.tokenizer = letters
        results = generator.generate(requests)
        generator.tokenizer = None
        # the right length: of the shortest beginning whose text has the stop in it
        ends = next(n for n in range(1, 21) if across in letters.decode(free[:n]))
        assert [len(r.token_ids) for r in results[2:]] == [20, 20], name
        assert results[0].token_ids == free[:ends] and results[0].finish_reason == "stop"
        assert results[1].finish_reason == "stop" and results[2].finish_reason == "length"
    with pytest.raises(GenerationError, match="stop = .*texts that are not empty"):
        SamplingParams(4, stop=("",))


def test_the_engine_of_transformers_streams_aborts_and_refuses(reference: Any) -> None:
    from rl3d.generation import HFGenerator

    generator = HFGenerator(reference, max_sequences=3, max_sequence_length=MAX_LENGTH)
    lengths = {"long": 20, "short": 3, "cut": 20, "late": 5, "none": 0, "wait": 9}
    requests = [Request(PROMPT, SamplingParams(n, temperature=0.0), (0, i, 0), name)
                for i, (name, n) in enumerate(lengths.items())]  # fmt: skip
    seen: list[tuple[str, int]] = []
    progress: list[Progress] = []

    def step(now: Progress) -> None:
        progress.append(now)
        if now.tokens == 13:  # the fifth step: "short" has ended
            generator.abort("cut")
            generator.abort("wait")

    results = generator.generate(requests, lambda r: seen.append((r.request_id, len(progress))), step)
    free = hf(reference, PROMPT, 20)
    assert [len(r.token_ids) for r in results] == [20, 3, 5, 5, 0, 0]
    assert all(r.token_ids == free[: len(r.token_ids)] for r in results)
    assert [r.finish_reason for r in results] == ["length", "length", "abort", "length", "length", "abort"]
    assert [name for name, _ in seen][:3] == ["none", "short", "cut"] and dict(seen)["short"] < dict(seen)["long"]
    assert progress[-1] == Progress(0, 0, 6, sum(len(r.token_ids) for r in results))
    with pytest.raises(GenerationError, match=f"request 0 .*exceeds max_sequence_length {MAX_LENGTH}"):
        generator.generate([Request(PROMPT, SamplingParams(MAX_LENGTH))])
    generator.expected_version = 1
    with pytest.raises(RuntimeError, match="version 0, expected 1"):
        generator.generate(requests)
    with pytest.raises(GenerationError, match="no parameter 'model.nothing'"):
        generator.load_weights(iter([("model.nothing", torch.zeros(1))]))
    with pytest.raises(RuntimeError, match="never loaded"):
        generator.generate(requests)
    with pytest.raises(GenerationError, match="never came"):
        generator.load_weights(iter([]))


def test_a_stream_yields_as_sequences_end_and_can_be_left(engine: Any) -> None:
    from rl3d.generation import stream

    lengths = (9, 2, 30, 4, 60, 3)
    requests = [Request(PROMPT, SamplingParams(n, temperature=0.0), (0, i, 0), f"r{i}") for i, n in enumerate(lengths)]
    drawn: list[int] = []
    seen = [(r.request_id, drawn[-1] if drawn else 0) for r in stream(engine, requests, lambda p: drawn.append(p.tokens))]
    assert [name for name, _ in seen][0] == "r1" and {name for name, _ in seen} == {f"r{i}" for i in range(6)}
    assert seen[0][1] < drawn[-1] / 2  # others were still running
    endless = [Request(PROMPT, SamplingParams(80), (0, i, 0)) for i in range(40)]
    first = next(iter(results := stream(engine, [*requests[:2], *endless])))
    results.close()  # type: ignore[attr-defined]
    assert first.request_id == "r1" and engine.counts.drawn < 40 * 80
    with pytest.raises(GenerationError, match="prompt is empty"):
        list(stream(engine, [Request([], GREEDY)]))
    with pytest.raises(GenerationError, match="request ids are not unique"):
        list(stream(engine, [Request(PROMPT, GREEDY, request_id="1"), Request(PROMPT, GREEDY)]))


@pytest.mark.parametrize("strategy", ["full", "adaptive", "lightweight"])
def test_the_cache_keeps_its_address_between_switches(model: Path, groups: Any, strategy: str) -> None:
    """What captured graphs need: nothing between two batches moves the pools or drops what was captured, whatever there is
    of memory."""
    engine = build_engine(str(model), groups, cache_strategy=strategy, fused=True)
    requests = [Request(PROMPT, SamplingParams(12, n=n), (0, n, 0)) for n in (1, 5, 2)]
    before = [engine.generate([r]) for r in requests]
    place, epoch = engine.cache.keys.data_ptr(), engine.cache.epoch
    engine.runner._captured["kept"] = SimpleNamespace(reset=lambda: None)  # stands for a graph; on a CPU there are none
    held = []
    for version, (request, expected) in enumerate(zip([*requests, requests[0]], [*before, before[0]], strict=True)):
        engine.release_cache()
        engine.weights_version = version
        engine.allocate_cache()
        assert engine.generate([request]) == expected
        held.append(engine.cache_bytes)
    assert (engine.cache.keys.data_ptr(), engine.cache.epoch) == (place, epoch) and "kept" in engine.runner._captured
    assert (len(set(held)) > 1) == (strategy == "adaptive") and (held[-1] == 0) == (strategy == "lightweight")
    if strategy == "adaptive":  # memory of torch's is somewhere else each time
        engine.cache.use_torch()
        assert engine.generate([requests[0]]) == before[0]
        assert engine.cache.epoch == epoch + 1 and not engine.runner._captured, "pools at another address void graphs"
        engine.runner._captured["kept"] = SimpleNamespace(reset=lambda: None)
        engine.release_cache()
        assert not engine.runner._captured
        return
    engine.drop_cache()
    assert engine.cache_bytes == 0 and not engine.runner._captured, "who asks for all of it gets the graphs' memory, too"
