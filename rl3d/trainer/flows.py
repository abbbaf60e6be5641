"""The three flows of a step: sampling -> rewarding -> updating. Each is a plain function, joined to the next by a queue.

Any of them can be replaced, and rewarding can be doubled or dropped: ``RLTrainer(..., flows=Flows(rewarding=[mine]))``.
Rewarding runs in threads beside sampling and starts with the first finished response.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rl3d.algorithms.advantages import grpo_advantages
from rl3d.config import PPOConfig, RolloutConfig
from rl3d.data.batch import FinishReason, Prompt, Sample
from rl3d.engine.actor import Actor
from rl3d.engine.policy import TrainSample
from rl3d.generation.engine import Request, Result, SamplingParams
from rl3d.rewards.runner import RewardRunner
from rl3d.trainer import metrics as names
from rl3d.trainer.console import Console
from rl3d.trainer.exchange import sample_uid

END = None  # what a flow puts into its queue when nothing more will come


@dataclass
class StepContext:
    """What a flow may use. One per step; the same on every rank but for ``timings``."""

    step: int
    prompts: list[Prompt]
    actor: Actor
    tokenizer: Any
    algorithm: PPOConfig
    rollout: RolloutConfig
    rewards: RewardRunner
    console: Console
    seed: int
    lr_of_step: Callable[[], float]
    optimizer_stepped: Callable[[], None]
    stop_token_ids: tuple[int, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def leads_replica(self) -> bool:
        """Whether this rank speaks for its generation replica; the others of a replica know the same samples."""
        groups = self.actor.parts.gen_groups
        return groups is not None and groups.tp_rank == 0


def sampling_flow(ctx: StepContext, out: "queue.Queue[Sample | None]") -> None:
    """Sample this replica's share of the prompts; each response goes into ``out`` the moment it ends."""
    share = ctx.actor.replica_share(len(ctx.prompts))
    prompts = [ctx.prompts[i] for i in share]
    r = ctx.rollout
    params = SamplingParams(r.max_new_tokens, r.temperature, r.top_p, r.top_k, ctx.stop_token_ids, n=r.n, seed=ctx.seed)
    # the place in the batch, not in the data: one batch may hold the last prompts of an epoch and the first of the next
    requests = [Request(ctx.prompts[i].token_ids, params, (ctx.step, i, 0)) for i in share]
    close_calls = 0

    with ctx.console.progress(f"[Step {ctx.step}] Sampling", len(requests) * r.n) as advance:

        def finished(result: Result) -> None:
            nonlocal close_calls
            close_calls += result.small_margins
            prompt = prompts[result.request_index]
            text = ctx.tokenizer.decode(result.token_ids, skip_special_tokens=True) if ctx.tokenizer else ""
            out.put(Sample(
                uid=sample_uid(prompt, result.sample_index), prompt_index=prompt.index, sample_index=result.sample_index,
                prompt_ids=prompt.token_ids, response_ids=result.token_ids, logprobs=result.logprobs,
                finish_reason=cast(FinishReason, result.finish_reason), text=text, score=None, failed=False, info={},
            ))  # fmt: skip
            advance(1)

        ctx.actor.sample(requests, on_finish=finished)
    ctx.metrics["training/rollout_close_calls"] = float(close_calls)


def rewarding_flow(ctx: StepContext, inbox: "queue.Queue[Sample | None]", out: "queue.Queue[Sample]") -> None:
    """Score samples as they come, several at a time; a sample whose reward fails is marked, not scored 0."""
    prompts = {p.uid: p for p in ctx.prompts}
    pending = []
    while (sample := inbox.get()) is not END:
        prompt = prompts[sample.uid.rsplit("-", 1)[0]]
        pending.append(ctx.rewards.submit(sample, prompt))
    for future in pending:
        out.put(future.result())


def updating_flow(ctx: StepContext, samples: Sequence[Sample]) -> dict[str, float]:
    """GRPO: advantages within each prompt's group, old and reference log-probabilities, optimiser steps."""
    actor, algorithm, n = ctx.actor, ctx.algorithm, ctx.rollout.n
    start = time.perf_counter()
    scores = torch.tensor([float("nan") if s.failed or s.score is None else s.score for s in samples])
    group = torch.arange(len(samples)) // n
    advantages = grpo_advantages(scores, group, normalize_by_std=algorithm.norm_adv_by_std)
    valid = scores.isfinite().tolist()
    batch = [
        TrainSample(s.prompt_ids, s.response_ids, a, s.logprobs, ok)
        for s, a, ok in zip(samples, advantages.tolist(), valid, strict=True)
    ]
    size = algorithm.mini_batch_size * n
    mini_batches = [range(i, i + size) for i in range(0, len(batch), size)]
    ctx.timings[names.TIMING_ADV] = time.perf_counter() - start

    def run() -> dict[str, float]:
        update = actor.policy_update(batch, mini_batches, ctx.rollout.temperature, algorithm)
        out = _timed(ctx, names.TIMING_OLD_LOG_PROB, update.old_logprobs)
        if actor.parts.reference is not None:
            reference = actor.parts.reference
            out |= _timed(ctx, names.TIMING_REF, lambda: update.reference_logprobs(reference))
        total = algorithm.ppo_epochs * len(mini_batches)
        ctx.console.updating(ctx.step, total)

        def stepped() -> None:
            actor.hybrid.weights_changed()
            ctx.optimizer_stepped()

        def optimise() -> dict[str, float]:
            with ctx.console.progress(f"[Step {ctx.step}] Updating", total) as advance:
                return update.step(ctx.lr_of_step, on_mini_batch=lambda index, _: advance(1 if index else 0),
                                   on_step=stepped)  # fmt: skip

        return out | _timed(ctx, names.TIMING_UPDATE_ACTOR, optimise)

    out = actor.call("update", run)
    used = [a for a, ok in zip(advantages.tolist(), valid, strict=True) if ok]
    return out | names.spread(names.ADVANTAGES, used) | names.spread(names.RETURNS, used)


def _timed(ctx: StepContext, name: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    start = time.perf_counter()
    out = run()
    if ctx.actor.runtime.device.type == "cuda":
        torch.cuda.synchronize()
    ctx.timings[name] = time.perf_counter() - start
    return out


SamplingFlow = Callable[[StepContext, "queue.Queue[Sample | None]"], None]
RewardingFlow = Callable[[StepContext, "queue.Queue[Sample | None]", "queue.Queue[Sample]"], None]
UpdatingFlow = Callable[[StepContext, Sequence[Sample]], dict[str, float]]


@dataclass
class Flows:
    """The flows of a trainer. Several rewarding flows share the work; none leaves samples unscored."""

    sampling: SamplingFlow = sampling_flow
    rewarding: Sequence[RewardingFlow] = (rewarding_flow,)
    updating: UpdatingFlow = updating_flow


def run_sampling_and_rewarding(ctx: StepContext, flows: Flows) -> list[Sample]:
    """Sampling in this thread, rewarding beside it; this replica's samples (on its leading rank, elsewhere none).

    Raises:
        Exception: the first error of any flow, after all of them have ended.
    """
    produced: queue.Queue[Sample | None] = queue.Queue()
    scored: queue.Queue[Sample] = queue.Queue()
    errors: list[BaseException] = []
    workers = [threading.Thread(target=_guarded, args=(f, ctx, produced, scored, errors), daemon=True)
               for f in (flows.rewarding if ctx.leads_replica else ())]  # fmt: skip
    for worker in workers:
        worker.start()
    start = time.perf_counter()
    try:
        flows.sampling(ctx, produced)
    finally:
        ctx.timings[names.TIMING_GEN] = time.perf_counter() - start
        for _ in workers:
            produced.put(END)
        ctx.console.rewarding(ctx.step, len(ctx.prompts) * ctx.rollout.n)
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        ctx.timings[names.TIMING_REWARD] = time.perf_counter() - start  # beyond what overlapped with sampling
    if errors:
        raise errors[0]
    if not ctx.leads_replica:
        return []
    return _drain(scored if workers else produced)


def score_at_boundary(ctx: StepContext, samples: Sequence[Sample]) -> list[Sample]:
    """Add the rewards that do not run beside sampling, models on the GPU, to this replica's samples; no communication.

    After the switch to training, when the KV cache is gone.
    """
    if not samples or not ctx.rewards.at_boundary:
        return list(samples)
    start = time.perf_counter()
    out = ctx.rewards.finish(samples, ctx.prompts)
    ctx.timings[names.TIMING_REWARD] = ctx.timings.get(names.TIMING_REWARD, 0.0) + time.perf_counter() - start
    return out


def _guarded(flow: RewardingFlow, ctx: StepContext, inbox: Any, out: Any, errors: list[BaseException]) -> None:
    try:
        flow(ctx, inbox, out)
    except BaseException as error:  # carried to the main thread, which stops the run
        errors.append(error)


def _drain(box: Any) -> list[Sample]:
    out = []
    while not box.empty():
        sample = box.get()
        if sample is not END:
            out.append(sample)
    return out
