"""The three flows of a step: sampling -> rewarding -> updating. Each is a plain function, joined to the next by a queue.

Any of them can be replaced, and rewarding can be doubled or dropped: ``RLTrainer(..., flows=Flows(rewarding=[mine]))``.
Rewarding runs in threads beside sampling and starts with the first finished response.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from rl3d.algorithms.advantages import grpo_advantages
from rl3d.config import PPOConfig, RolloutConfig
from rl3d.data.batch import FinishReason, Prompt, Sample
from rl3d.engine.actor import Actor
from rl3d.engine.critic import Critic
from rl3d.engine.policy import PolicyUpdate, TrainSample
from rl3d.engine.reward_model import RewardModel
from rl3d.generation.engine import Request, Result, SamplingParams
from rl3d.rewards.runner import RewardRunner
from rl3d.trainer import metrics as names
from rl3d.trainer.console import Console
from rl3d.trainer.exchange import sample_uid
from rl3d.utils.peaks import PhasePeaks

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
    critic: Critic | None = None
    critic_lr_of_step: Callable[[], float] = lambda: 0.0
    critic_stepped: Callable[[], None] = lambda: None
    peaks: PhasePeaks = field(default_factory=lambda: PhasePeaks("cpu"))
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def adds_to(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a timing."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

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
    params = SamplingParams(
        r.max_new_tokens,
        r.temperature,
        r.top_p,
        r.top_k,
        ctx.stop_token_ids,
        n=r.n,
        seed=ctx.seed,
        min_p=r.min_p,
        stop=tuple(r.stop),
    )
    # the place in the batch, not in the data: one batch may hold the last prompts of an epoch and the first of the next
    requests = [Request(ctx.prompts[i].token_ids, params, (ctx.step, i, 0)) for i in share]
    close_calls, drawn, shift = 0, 0, 0.0

    with ctx.console.progress(f"[Step {ctx.step}] Sampling", len(requests) * r.n) as advance:

        def finished(result: Result) -> None:
            nonlocal close_calls, drawn, shift
            close_calls += result.small_margins
            drawn += len(result.token_ids)
            shift += sum(result.sampled_logprobs) - sum(result.logprobs)
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
    # what top-p, top-k and min-p add to the log-probability of a token, which training does not see; 0 without them
    ctx.metrics["training/rollout_filter_shift_mean"] = shift / max(drawn, 1)


def rewarding_flow(ctx: StepContext, inbox: "queue.Queue[Sample | None]", out: "queue.Queue[Sample]") -> None:
    """Score samples as they come, several at a time; a sample whose reward fails is marked, not scored 0."""
    prompts = {p.uid: p for p in ctx.prompts}
    pending = []
    while (sample := inbox.get()) is not END:
        prompt = prompts[sample.uid.rsplit("-", 1)[0]]
        pending.append(ctx.rewards.submit(sample, prompt))
    for future in pending:
        out.put(future.result())


def add_model_scores(ctx: StepContext, samples: Sequence[Sample], model: RewardModel, weight: float) -> list[Sample]:
    """Samples with ``weight`` times the reward model's score of prompt and response added; failed ones stay failed.

    At a phase boundary, on every rank: the model is spread over the training layout. ``info["reward_model"]`` has the
    score by itself.
    """
    with ctx.adds_to(names.TIMING_REWARD):
        scores = ctx.actor.call("reward_model", lambda: model.scores([s.prompt_ids + s.response_ids for s in samples]))
    out = []
    for sample, score in zip(samples, scores, strict=True):
        total = None if sample.failed or sample.score is None else sample.score + weight * score
        out.append(replace(sample, score=total, info={**sample.info, "reward_model": score}))
    return out


def updating_flow(ctx: StepContext, samples: Sequence[Sample]) -> dict[str, float]:
    """What every later phase reads is put into the rows of one update: old and reference log-probabilities, values,
    advantages; then the critic's and the actor's optimiser steps."""
    actor, algorithm, critic = ctx.actor, ctx.algorithm, ctx.critic
    batch = train_samples(samples, algorithm, ctx.rollout.n)
    size = algorithm.mini_batch_size * ctx.rollout.n
    mini_batches = [range(i, i + size) for i in range(0, len(batch), size)]

    def run() -> dict[str, float]:
        with ctx.adds_to(names.TIMING_ROWS):
            update = actor.policy_update(batch, mini_batches, ctx.rollout.temperature, algorithm)
        out = _timed(ctx, names.TIMING_OLD_LOG_PROB, update.old_logprobs)
        if actor.parts.reference is not None:
            reference = actor.parts.reference
            out |= _timed(ctx, names.TIMING_REF, lambda: update.reference_logprobs(reference))
        if critic is not None:
            out |= _timed(ctx, names.TIMING_VALUES, lambda: critic.values(update))
        out |= _timed(ctx, names.TIMING_ADV, update.advantages)
        if critic is not None and not critic.frozen:
            out |= _timed(ctx, names.TIMING_UPDATE_CRITIC, lambda: _update_critic(ctx, critic, update))
        if ctx.step >= algorithm.critic_only_steps:
            out |= _timed(ctx, names.TIMING_UPDATE_ACTOR, lambda: _update_actor(ctx, update))
        return out

    return actor.call("update", run)


def train_samples(samples: Sequence[Sample], algorithm: PPOConfig, n: int) -> list[TrainSample]:
    """Scored samples as the update takes them, ``n`` of each prompt in a row; failed ones are left out of the loss."""
    scores = torch.tensor([float("nan") if s.failed or s.score is None else s.score for s in samples])
    advantages = torch.zeros_like(scores)  # ppo works them out from the scores, token by token
    if algorithm.name == "grpo":
        group = torch.arange(len(samples)) // n
        advantages = grpo_advantages(scores, group, normalize_by_std=algorithm.norm_adv_by_std)
    return [
        TrainSample(s.prompt_ids, s.response_ids, advantage, s.logprobs, ok, score)
        for s, advantage, ok, score in zip(
            samples, advantages.tolist(), scores.isfinite().tolist(), scores.tolist(), strict=True
        )
    ]


def _update_actor(ctx: StepContext, update: PolicyUpdate) -> dict[str, float]:
    total = ctx.algorithm.ppo_epochs * len(update.mini_batches)
    ctx.console.updating(ctx.step, total)

    def stepped() -> None:
        ctx.actor.hybrid.weights_changed()
        ctx.optimizer_stepped()

    with ctx.console.progress(f"[Step {ctx.step}] Updating", total) as advance:
        return update.step(ctx.lr_of_step, on_mini_batch=lambda index, _: advance(1 if index else 0), on_step=stepped)


def _update_critic(ctx: StepContext, critic: Critic, update: PolicyUpdate) -> dict[str, float]:
    total = ctx.algorithm.ppo_epochs * len(update.mini_batches)
    ctx.console.updating(ctx.step, total, "critic")
    with ctx.console.progress(f"[Step {ctx.step}] Updating critic", total) as advance:
        return critic.update(update, ctx.critic_lr_of_step, on_mini_batch=lambda index, _: advance(1 if index else 0),
                             on_step=ctx.critic_stepped)  # fmt: skip


def _timed(ctx: StepContext, name: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    start = time.perf_counter()
    with ctx.peaks.phase(name.rpartition("/")[2]):
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
    with ctx.adds_to(names.TIMING_REWARD):
        return ctx.rewards.finish(samples, ctx.prompts)


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
