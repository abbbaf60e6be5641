"""``RLTrainer``: prompts in, a better policy out; one step reads top to bottom in :meth:`RLTrainer.step`."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rl3d.config import PPOConfig, RolloutConfig, RunConfig, TrainerConfig
from rl3d.data.batch import Sample
from rl3d.data.dataset import PromptDataset, PromptStream
from rl3d.engine.actor import Actor
from rl3d.engine.critic import Critic
from rl3d.engine.reward_model import RewardModel
from rl3d.engine.session_actor import SessionActor
from rl3d.engine.training import TrainingEngine
from rl3d.estimate.flops import peak_flops, training_flops
from rl3d.estimate.memory import MemoryPlan
from rl3d.rewards.runner import as_runner
from rl3d.trainer import checkpoint, memory
from rl3d.trainer import metrics as names
from rl3d.trainer.console import Console
from rl3d.trainer.exchange import exchange
from rl3d.trainer.flows import Flows, StepContext, add_model_scores, run_sampling_and_rewarding, score_at_boundary
from rl3d.trainer.loggers import MetricsWriter, write_samples
from rl3d.trainer.schedule import learning_rate
from rl3d.trainer.stopping import StopRequest
from rl3d.utils.peaks import PhasePeaks

Callback = Callable[[int, dict[str, Any]], None]


class RLTrainer:
    """Trains an actor with GRPO or PPO on prompts and a reward.

    Every rank of the job makes the same one and calls :meth:`train`.

    Args:
        actor_model: an :class:`~rl3d.Actor`, or what it takes as ``model`` (then built with its defaults). With the actor
            of a session (``Actor(..., num_gpus=N)``) this is a :class:`~rl3d.trainer.session_trainer.SessionTrainer`.
        tokenizer: Hugging Face tokenizer; ``None`` takes the actor's.
        dataset: rows with ``prompt`` and optional ``answer`` (a list of dicts, a Hugging Face dataset, ...), a
            :class:`~rl3d.data.dataset.PromptDataset`, or a stream over one.
        config: the algorithm; by default the actor's.
        reward_fn: ``reward_fn(prompt, response) -> float`` (other columns reach it by name), a
            :class:`~rl3d.rewards.models.ModelReward`, a :class:`~rl3d.rewards.http.HttpReward`, a ``torch.nn.Module`` that
            scores token ids, a list of these (or of pairs with a weight), or a
            :class:`~rl3d.rewards.runner.RewardRunner`.
        rollout, trainer: those sections of a run's configuration.
        flows: your own sampling, rewarding or updating flow.
        run_config: the whole configuration of the run, shown by loggers.
        memory_plan: shown beside the measured peaks.
        reward_model: a :class:`~rl3d.engine.reward_model.RewardModel` and its weight; its score is added to the reward
            functions', or stands alone without any.
        critic: a :class:`~rl3d.engine.critic.Critic`; by default one is made when ``config.use_critic`` asks for it.

    Raises:
        ValueError: a batch larger than the data, or settings that do not fit together.
    """

    def __new__(cls, actor_model: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(actor_model, SessionActor):
            return super().__new__(cls)
        from rl3d.trainer.session_trainer import SessionTrainer

        return SessionTrainer(actor_model, *args, **options)

    def __init__(self, actor_model: Any, tokenizer: Any = None, dataset: Any = None, config: PPOConfig | None = None,
                 reward_fn: Any = None, *, rollout: RolloutConfig | None = None, trainer: TrainerConfig | None = None,
                 flows: Flows | None = None, run_config: RunConfig | None = None, memory_plan: MemoryPlan | None = None,
                 critic: Critic | None = None, reward_model: tuple[RewardModel, float] | None = None):  # fmt: skip
        self.rollout = rollout or RolloutConfig()
        self.settings = trainer or TrainerConfig(resume="never")  # scripts that give no name share one directory
        if isinstance(actor_model, Actor):
            self.actor = actor_model
        else:
            self.actor = Actor(actor_model, tokenizer, algorithm=config or PPOConfig(), seed=self.settings.seed,
                               timeout_s=self.settings.timeout_s)  # fmt: skip
        self.algorithm = config or self.actor.algorithm
        self.actor.check_fits(self.algorithm)
        if critic is not None and not self.algorithm.use_critic:
            raise ValueError("RLTrainer has a critic and use_critic is false; leave one out, or set name='ppo'")
        if critic is None and self.algorithm.use_critic:
            critic = Critic(self.actor, self.algorithm)
        self.critic = critic
        self.runtime = self.actor.runtime
        self.tokenizer = tokenizer if tokenizer is not None else self.actor.tokenizer
        if dataset is None or (reward_fn is None and reward_model is None):
            raise ValueError("RLTrainer needs a dataset and a reward_fn; pass both (or use RLTrainer.from_config)")
        self.reward_model = reward_model
        if not isinstance(dataset, PromptDataset | PromptStream):
            room = self.actor.settings.max_sequence_length - self.rollout.max_new_tokens
            dataset = PromptDataset(list(dataset), self.tokenizer, max_prompt_tokens=room)
        if not isinstance(dataset, PromptStream):
            dataset = PromptStream(dataset, self.algorithm.batch_size, seed=self.settings.seed)
        self.stream = dataset
        self.rewards = as_runner(reward_fn if reward_fn is not None else _no_rule)
        self.flows = flows or Flows()
        self.run_config = run_config
        self.memory_plan, self.peaks = memory_plan, PhasePeaks(self.runtime.device)
        self.run_dir = self.settings.run_dir
        self.console = Console(self.runtime.rank == 0 and "console" in self.settings.loggers)
        self.stop_token_ids = tuple(dict.fromkeys([*self.actor.source.stop_token_ids, *self.rollout.stop_token_ids]))
        self.global_step = 0
        self.optimizer_steps = 0
        self.critic_steps = 0
        self.stopped = False
        self._callbacks: list[tuple[Callback, bool]] = []
        self._total_steps = 0

    @classmethod
    def from_config(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RLTrainer":
        """The trainer of a configuration file, with ``key=value`` overrides. See ``rl3d config``."""
        from rl3d.trainer.run import build, resolve_file

        return build(resolve_file(path, overrides))

    def add_callback(self, callback: Callback, *, every_rank: bool = False) -> None:
        """Call ``callback(step, logs)`` after each step; ``logs`` holds all metrics and ``reward_mean``.

        On rank 0 only, unless ``every_rank``.
        """
        self._callbacks.append((callback, every_rank))

    # ---- the loop

    def train(self, num_train_epochs: int | None = None) -> dict[str, Any]:
        """Run to the end: ``trainer.steps``, or epochs over the data. Resumes as ``trainer.resume`` says.

        SIGUSR1 to any rank ends it after the step at hand with a checkpoint, :attr:`stopped` set and no export.

        Returns:
            the metrics of the last step (empty when there was nothing left to do).
        """
        self._total_steps = self._steps(num_train_epochs)
        self._resume()
        logs = self._run(self._total_steps)
        if self.stopped:
            return logs
        if (text := memory.outcome(self.peaks, self.memory_plan, self.runtime)) is not None:
            self.console.line(text)
        if self.settings.export_hf:
            self.actor.save_hf(self.run_dir / "hf")
            self.console.line(f"Wrote {self.run_dir / 'hf'}")
            if (critic := self.critic) is not None and not critic.frozen:
                self.actor.call("save_critic", lambda: critic.save_hf(self.run_dir / "critic"))
        return logs

    def train_for(self, steps: int) -> dict[str, Any]:
        """At most ``steps`` more steps of the same run, and a checkpoint; :meth:`train` goes on from there."""
        self._total_steps = self._steps(None)
        self._resume()
        return self._run(min(self.global_step + steps, self._total_steps))

    def _run(self, until: int) -> dict[str, Any]:
        config = self.run_config.model_dump(mode="json") if self.run_config else None
        logs: dict[str, Any] = {}
        saved = self.global_step
        with MetricsWriter(self.settings.loggers, self.run_dir, config, start_step=self.global_step,
                           rank=self.runtime.rank) as writer, StopRequest(self.runtime) as stop:  # fmt: skip
            while self.global_step < until and not self.stopped:
                logs = self.step(writer)
                if self.settings.save_every and self.global_step % self.settings.save_every == 0:
                    self.save()
                    saved = self.global_step
                self.stopped = stop.agreed() and self.global_step < until
        if saved < self.global_step:
            self.save()
        if self.stopped:
            self.console.line(f"Stopped by SIGUSR1 after {self.global_step} steps; the same command goes on from there")
        return logs

    def step(self, writer: MetricsWriter | None = None) -> dict[str, Any]:
        """One step: sample, score, update. Returns its metrics, the same on every rank but for timings."""
        start = time.perf_counter()
        step, actor, n = self.global_step, self.actor, self.rollout.n
        ctx = StepContext(
            step, self.stream.next_batch(), actor, self.tokenizer, self.algorithm, self.rollout, self.rewards,
            self.console, self._seed(), self._lr, self._stepped, self.stop_token_ids, self.critic, self._critic_lr,
            self._critic_stepped, peaks=self.peaks,
        )  # fmt: skip
        self.console.sampling(step, len(ctx.prompts), len(ctx.prompts) * n)
        with self.peaks.phase("gen"):
            with ctx.adds_to(names.TIMING_UPDATE_WEIGHTS):
                actor.switch_to_generation()
            mine = run_sampling_and_rewarding(ctx, self.flows)
        with ctx.adds_to(names.TIMING_UPDATE_WEIGHTS):
            actor.switch_to_training()
        mine = score_at_boundary(ctx, mine)
        with ctx.adds_to(names.TIMING_EXCHANGE):
            samples = exchange(mine, ctx.prompts, n, actor.parts.gen_groups, self.runtime.cpu_group)
        self.rewards.check_failures(samples)
        if self.reward_model is not None:
            samples = add_model_scores(ctx, samples, *self.reward_model)
        metrics = self.flows.updating(ctx, samples)

        ctx.timings[names.TIMING_STEP] = time.perf_counter() - start
        logs = self._logs(ctx, samples, metrics)
        self.global_step += 1
        self._report(step, logs, samples, writer)
        return logs

    # ---- helpers

    def _steps(self, num_train_epochs: int | None) -> int:
        if num_train_epochs is None and self.settings.steps is not None:
            return self.settings.steps
        return (num_train_epochs or self.settings.epochs or 1) * self.stream.batches_per_epoch

    def _seed(self) -> int:
        return self.settings.seed if self.rollout.seed is None else self.rollout.seed

    def _lr(self) -> float:
        per_step = self.algorithm.ppo_epochs * self.algorithm.mini_batches
        steps = self._total_steps - self.algorithm.critic_only_steps
        return learning_rate(self.algorithm, self.optimizer_steps, steps * per_step)

    def _stepped(self) -> None:
        self.optimizer_steps += 1

    def _critic_lr(self) -> float:
        per_step = self.algorithm.ppo_epochs * self.algorithm.mini_batches
        return learning_rate(self.algorithm, self.critic_steps, self._total_steps * per_step, critic=True)

    def _critic_stepped(self) -> None:
        self.critic_steps += 1

    def _logs(self, ctx: StepContext, samples: Sequence[Sample], metrics: dict[str, float]) -> dict[str, Any]:
        scores = [s.score for s in samples if not s.failed and s.score is not None]
        tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        seconds = ctx.timings[names.TIMING_STEP]
        spread = names.spread(names.SCORE, scores) | names.spread(names.REWARDS, scores)
        limit = self.actor.settings.max_sequence_length - self.rollout.max_new_tokens
        return {
            **spread, **metrics, **ctx.metrics, **ctx.timings, **self._mfu(ctx, samples),
            **memory.metrics(self.peaks, self.memory_plan),
            **names.lengths(names.RESPONSE_LENGTH, [len(s.response_ids) for s in samples], self.rollout.max_new_tokens),
            **names.lengths(names.PROMPT_LENGTH, [len(s.prompt_ids) for s in samples], limit),
            names.TOTAL_TOKENS: tokens, names.TIME_PER_STEP: seconds, names.MAX_MEMORY_GB: self.peaks.overall / 1e9,
            names.THROUGHPUT: tokens / seconds / self.runtime.world_size,
            names.GLOBAL_STEP: ctx.step, names.EPOCH: self.stream.epoch,
            "reward/failed": sum(s.failed for s in samples),
            "reward_mean": spread.get(f"{names.SCORE}/mean", float("nan")),
        }  # fmt: skip

    def _mfu(self, ctx: StepContext, samples: Sequence[Sample]) -> dict[str, float]:
        """Share of the devices' peak that the policy update reached; nothing where the peak is not known."""
        name = torch.cuda.get_device_name(self.runtime.device) if self.runtime.device.type == "cuda" else ""
        peak, seconds = peak_flops(name), ctx.timings.get(names.TIMING_UPDATE_ACTOR)
        if peak is None or not seconds or self.actor.settings.dtype == torch.float32:
            return {}
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        work = training_flops(self.actor.parts.arch, lengths, sum(len(s.response_ids) for s in samples))
        return {names.MFU_ACTOR: work * self.algorithm.ppo_epochs / (seconds * peak * self.runtime.world_size)}

    def _report(self, step: int, logs: dict[str, Any], samples: Sequence[Sample], writer: MetricsWriter | None) -> None:
        kl = names.ACTOR_PPO_KL
        if self.actor.parts.reference is not None:
            kl = names.ACTOR_KL_LOSS if self.algorithm.kl_in == "loss" else "actor/reward_kl_penalty"
        losses = logs.get("actor/total_loss"), logs.get("critic/vf_loss")
        self.console.result(step, losses[0], logs["reward_mean"], logs.get(kl), losses[1])
        if writer is not None:
            writer.log(step, logs)
        if self.runtime.rank == 0 and self.settings.samples_per_step:
            shown = samples[: self.settings.samples_per_step]
            write_samples(self.run_dir, step, [self._sample_row(s) for s in shown])
        for callback, every_rank in self._callbacks:
            if every_rank or self.runtime.rank == 0:
                callback(step, logs)

    def _sample_row(self, s: Sample) -> dict[str, Any]:
        prompt = self.tokenizer.decode(s.prompt_ids) if self.tokenizer is not None else str(s.prompt_ids)
        return {"uid": s.uid, "prompt": prompt, "response": s.text, "score": s.score, "failed": s.failed,
                "finish_reason": s.finish_reason, "response_tokens": len(s.response_ids), **s.info}  # fmt: skip

    # ---- checkpoints

    @property
    def _layout(self) -> str:
        train = self.actor.settings.train.resolve(self.runtime.world_size)
        return f"{train}/{'-'.join(self.actor.parts.mesh_order)}"

    def save(self) -> Path:
        """Write a checkpoint of the run now. Collective."""
        state = checkpoint.RunState(self.global_step, self.optimizer_steps, self.stream.state_dict(), self._layout,
                                    self.runtime.world_size, self.critic_steps)  # fmt: skip
        keep, directory = self.settings.keep_checkpoints, self.run_dir / "checkpoints"

        def run() -> Path:
            with self._resident():
                return checkpoint.save(directory, state, self._engines(), self.runtime, keep, self._export)

        return self.actor.call("save", run)

    def _export(self, directory: Path) -> None:
        self.actor.save_hf(directory / checkpoint.WEIGHTS)
        if self.critic is not None and not self.critic.frozen:
            self.critic.save_hf(directory / checkpoint.CRITIC)

    def _engines(self) -> dict[str, TrainingEngine]:
        """What learns, by the name that it has in a checkpoint."""
        engines = {"zero": self.actor.parts.train}
        if self.critic is not None and self.critic.engine is not None:
            engines["critic"] = self.critic.engine
        return engines

    def _resident(self) -> AbstractContextManager[None]:
        return nullcontext() if self.critic is None else self.critic.residency.resident()

    def _resume(self) -> None:
        path = checkpoint.find(self.run_dir / "checkpoints", self.settings.resume)
        if path is None or self.global_step:
            return

        def run() -> checkpoint.RunState:
            with self._resident():
                return checkpoint.load(path, self._engines(), self.runtime, self._layout)

        state = self.actor.call("load", run)
        self.actor.hybrid.weights_changed()
        self.stream.load_state_dict(state.stream)
        self.global_step, self.optimizer_steps, self.critic_steps = state.step, state.optimizer_steps, state.critic_steps
        left = max(self._total_steps - state.step, 0)
        other = state.layout != self._layout or state.world_size != self.runtime.world_size
        carried = f", carried over from {state.layout.partition('/')[0]} on {state.world_size} ranks" if other else ""
        self.console.line(f"Resumed from {path}: {state.step} steps done, {left} to go{carried}")


def _no_rule(response: str) -> float:
    """The reward function of a run whose rewards come from a model alone."""
    return 0.0
