"""Changes that make a run fit, found by trying them: each is a setting a person can write down, with its new peak."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rl3d.config import zero_problem
from rl3d.estimate.memory import MemoryPlan
from rl3d.estimate.request import Request
from rl3d.estimate.table import shown
from rl3d.layout import GenLayout, LayoutError, TrainLayout, tp_sizes


@dataclass(frozen=True)
class Remedy:
    """Settings as ``key=value`` texts, and the plan with all of them."""

    changes: tuple[str, ...]
    plan: MemoryPlan

    def __str__(self) -> str:
        return f"{' '.join(self.changes)}: {shown(self.plan.needed)}"


Change = Callable[[Request], tuple[str, Request] | None]


def remedies(request: Request, capacity: float, most: int = 6) -> list[Remedy]:
    """Up to ``most`` ways to need at most ``capacity`` bytes, those that cost least first.

    Single changes come first. When no single one is enough, changes are added up in the order of their cost, and those
    that turn out not to be needed are taken back. Empty when nothing helps.
    """
    singles = [found for change in _CHANGES if (found := _try(change, request)) is not None]
    enough = [Remedy(tuple(text.split()), plan) for text, _, plan in singles if plan.needed <= capacity]
    if enough:
        return enough[:most]
    applied: list[Change] = []
    for change in _CHANGES:
        before = _apply(applied, request)
        found = _try(change, before[1])
        if found is None or found[2].needed >= before[1].plan().needed:
            continue
        applied.append(change)
        if found[2].needed <= capacity:
            break
    else:
        return []
    for change in list(applied):
        fewer = [c for c in applied if c is not change]
        if _apply(fewer, request)[1].plan().needed <= capacity:
            applied = fewer
    texts, changed = _apply(applied, request)
    return [Remedy(texts, changed.plan())]


def _try(change: Change, request: Request) -> tuple[str, Request, MemoryPlan] | None:
    found = change(request)
    if found is None:
        return None
    try:
        return (*found, found[1].plan())
    except LayoutError:
        return None


def _apply(changes: list[Change], request: Request) -> tuple[tuple[str, ...], Request]:
    texts: list[str] = []
    for change in changes:
        if (found := change(request)) is not None:
            texts += found[0].split()
            request = found[1]
    return tuple(texts), request


# ---- the changes, cheapest first


def _setting(key: str, field: str, value: Any, when: Callable[[Request], bool] = lambda r: True) -> Change:
    def change(request: Request) -> tuple[str, Request] | None:
        if getattr(request.settings, field) == value or not when(request):
            return None
        return f"{key}={value}", replace(request, settings=replace(request.settings, **{field: value}))

    return change


def _smaller(key: str, field: str, part: int, least: Callable[[Request], int]) -> Change:
    def change(request: Request) -> tuple[str, Request] | None:
        now = getattr(request.settings, field)
        if field == "max_sequences":
            now = request.settings.at_once(max(1, request.world // request.gen.tp))
        value = max(now // part, least(request))
        if value >= now:
            return None
        return f"{key}={value}", replace(request, settings=replace(request.settings, **{field: value}))

    return change


def _sequence_parallel(request: Request) -> tuple[str, Request] | None:
    if request.train.tp == 1 or request.settings.sequence_parallel:
        return None
    return "layout.sequence_parallel=true", replace(request, settings=replace(request.settings, sequence_parallel=True))


def _train(request: Request, **fields: int) -> tuple[str, Request] | None:
    try:
        train = replace(request.train, dp=None, **fields).resolve(request.world)
    except LayoutError:
        return None
    if train == request.train or zero_problem(train, request.settings.offload):
        return None
    settings = request.settings if train.tp > 1 else replace(request.settings, sequence_parallel=False)
    return f"layout.train={_text(train)}", replace(request, train=train, settings=settings)


def _text(train: TrainLayout) -> str:
    return str(replace(train, dp=None))


def _zero(stage: int) -> Change:
    def change(request: Request) -> tuple[str, Request] | None:
        if request.train.zero >= stage or request.train.pp > 1 or request.train.dp == 1:
            return None
        return _train(request, zero=stage)

    return change


def _more_tensor_parallel(request: Request) -> tuple[str, Request] | None:
    larger = [tp for tp in _sizes(request) if tp > request.train.tp]
    return next((found for tp in larger if (found := _train(request, tp=tp)) is not None), None)


def _more_generation_ranks(request: Request) -> tuple[str, Request] | None:
    larger = [tp for tp in _sizes(request) if tp > request.gen.tp and request.world % tp == 0]
    if not larger:
        return None
    return f"layout.gen=tp{larger[0]}", replace(request, gen=GenLayout(larger[0]))


def _sizes(request: Request) -> Iterator[int]:
    arch = request.arch
    return (tp for tp in tp_sizes(arch.num_heads, arch.num_kv_heads, arch.ffn_size) if tp <= request.world)


def _offload(request: Request) -> tuple[str, Request] | None:
    if request.train.zero == 0 or request.settings.offload != "none":
        return None
    # stage 1 in bf16 keeps whole fp32 gradients on the device; stage 2 sends each bucket to the host
    text, changed = "layout.offload=optimizer", replace(request, settings=replace(request.settings, offload="optimizer"))
    if request.train.zero == 1 and request.train.pp == 1:
        deeper = _train(changed, zero=2)
        if deeper is not None:
            return f"{text} {deeper[0]}", deeper[1]
    return text, changed


def _offload_params(request: Request) -> tuple[str, Request] | None:
    if request.train.pp > 1 or request.settings.offload == "params":
        return None
    if request.settings.training_copy == "drop":
        request = replace(request, settings=replace(request.settings, training_copy="keep"))
    deeper = _train(replace(request, settings=replace(request.settings, offload="none")), zero=3)
    changed = request if deeper is None else deeper[1]
    text = "layout.offload=params" + ("" if deeper is None else f" {deeper[0]}")
    return text, replace(changed, settings=replace(changed.settings, offload="params"))


def _coincide(request: Request) -> bool:
    """Whether generation reads the training weights themselves, which then cannot be dropped to save anything."""
    return request.settings.alias and (request.train.tp, request.train.pp) == (request.gen.tp, 1)


def _longest(request: Request) -> int:
    return request.settings.max_sequence_length


def _smaller_share(request: Request) -> tuple[str, Request] | None:
    """Less of the device for vLLM, whose cache takes what there is."""
    settings = request.settings
    share = round(settings.vllm_share / 2, 2)
    if settings.engine != "vllm" or settings.device_bytes is None or settings.vllm_cache is not None or share < 0.05:
        return None
    return f"rollout.vllm.gpu_memory_utilization={share}", replace(request, settings=replace(settings, vllm_share=share))


_CHANGES: tuple[Change, ...] = (
    _smaller_share,
    _setting("algorithm.reference_residency", "reference", "host", lambda r: r.settings.reference == "device"),
    _smaller("algorithm.micro_batch_tokens", "micro_batch_tokens", 2, _longest),
    _smaller("algorithm.logprob_chunk_tokens", "logprob_chunk_tokens", 4, lambda r: 64),
    _setting(
        "layout.training_copy",
        "training_copy",
        "drop",
        lambda r: r.train.zero < 3 and not _coincide(r) and r.settings.engine == "megatron",
    ),
    _setting("layout.gradients", "gradients", "drop"),
    _setting("layout.optimizer_state", "optimizer_state", "host", lambda r: r.settings.offload == "none"),
    _smaller("rollout.max_sequences", "max_sequences", 2, lambda r: 8),
    _smaller("rollout.max_batch_tokens", "max_prefill_tokens", 4, lambda r: 1024),
    _setting("algorithm.critic_residency", "critic", "host", lambda r: r.settings.critic == "device"),
    _zero(2),
    _sequence_parallel,
    _setting("layout.recompute", "recompute", "full"),
    _smaller("algorithm.micro_batch_tokens", "micro_batch_tokens", 1 << 30, _longest),
    _zero(3),
    _more_generation_ranks,
    _more_tensor_parallel,
    _smaller("rollout.max_sequences", "max_sequences", 8, lambda r: 4),
    _offload,
    _more_generation_ranks,
    _more_tensor_parallel,
    _offload_params,
)
