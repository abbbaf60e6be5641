"""``Actor``: a language model that trains in one layout and generates in another, in one program."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl3d.algorithms.advantages import grpo_advantages
from rl3d.config import ConfigError, PPOConfig, passthrough_problems, zero_stage_from_fsdp
from rl3d.distributed import bootstrap
from rl3d.distributed.control import ControlChannel
from rl3d.distributed.environment import detect
from rl3d.engine.assemble import ActorSettings, assemble
from rl3d.engine.batches import real_tokens, response_spans
from rl3d.engine.dtypes import dtype_of
from rl3d.engine.gather import gather_from_replicas
from rl3d.engine.hybrid import GENERATION, TRAINING, SwitchReport
from rl3d.engine.policy import PolicyUpdate, TrainSample
from rl3d.engine.saving import Saving
from rl3d.engine.source import ModelSource, open_model
from rl3d.generation.engine import OnFinish, OnStep, Request, Result, SamplingParams
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

_actors = itertools.count()  # every rank makes its actors in the same order, so the numbers agree


@dataclass
class RolloutOutput:
    """What :meth:`Actor.rollout` returns, equal on every rank; B sequences, P prompt columns, R response columns.

    Attributes:
        sequences: [B, P + R] token ids; the prompt columns as they were given, then the response, right-padded.
        logprobs: [B, R] log-probability of each response token at the sampling temperature, 0 where padded.
        response_mask: [B, R] bool, true on response tokens (the stop token included).
        finish_reasons: ``"stop"`` or ``"length"`` for each sequence.
    """

    sequences: Tensor
    logprobs: Tensor
    response_mask: Tensor
    finish_reasons: list[str]


@dataclass
class _Remembered:
    output: RolloutOutput
    prompts: list[list[int]]
    temperature: float


class Actor(Saving):
    """A causal language model under Megatron-core and DeepSpeed, with a switch between training and generation.

    Every rank of the job constructs it and makes the same calls with the same arguments (one rank is a job, too).
    The two switches may also be called on rank 0 alone: the other ranks carry them out in the background.

    Args:
        model: a Hugging Face directory, a hub id (``org/name`` or ``org/name@revision``), or a Hugging Face model
            object, unmodified.
        tokenizer: a Hugging Face tokenizer; by default the one in the model's directory, if any.
        train: training layout, e.g. ``"tp2.pp2.zero1"``; dp follows from the number of ranks.
        gen: generation layout, e.g. ``"tp4"``; the other ranks become replicas.
        order: axes of the training mesh, fastest first (``"tp-pp-dp"``); ``"auto"`` moves the least at a switch.
        dtype: ``"auto"`` (bfloat16 on CUDA, float32 on CPU), ``"bfloat16"`` or ``"float32"``.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        use_flash_attention: in training, take torch's variable-length flash kernel where there is one (CUDA, bf16).
        algorithm: losses, optimiser and batch settings (:class:`rl3d.PPOConfig`).
        max_sequence_length: longest prompt + response, in tokens; by default the model's own limit, 2,048 at most.
        max_sequences: sequences decoded at once on one replica.
        max_prefill_tokens: prompt tokens in one prefill batch.
        cache_strategy: of the key/value cache: ``"adaptive"``, ``"full"`` or ``"lightweight"`` (rl3d.generation.sizing).
        engine, engine_options: what generates: ``"megatron"``, built in; weights are streamed into ``"hf"`` (transformers,
            gen="tp1") and ``"vllm"`` (with options of ``vllm.LLM``).
        staging_mib: cap on the staging memory of a switch, MiB per direction.
        verify: compare fingerprints of every parameter after each switch.
        transport: ``"auto"``, ``"peer"``: ranks of a host read each other's memory (if they can, must); ``"p2p"``: messages.
        training_copy: ``"keep"``, or ``"drop"`` to give the training weights' memory back during generation.
        sequence_parallel: split the sequence over tensor-parallel ranks outside attention and MLP.
        recompute: activations computed again in the backward pass: ``"none"``, ``"selective"`` (core attention) or
            ``"full"`` (each layer).
        offload: ``"none"``; ``"optimizer"``: optimiser state lives in host memory and the step runs there; ``"params"``:
            the weights rest there as well (zero3).
        reference: keep a frozen copy of the initial weights for the KL penalty; by default when ``algorithm`` is given
            and asks for one. Without ``algorithm`` there is no penalty.
        reference_residency: ``"device"`` or ``"host"``.
        deepspeed, megatron: settings passed through to those libraries.
        seed: of the sampling noise.
        timeout_s: limit for every collective and wait.
        num_gpus: start this many ranks from here, a notebook for instance, and drive them: see
            :class:`~rl3d.engine.session_actor.SessionActor`, which is returned. In a process that is a rank already, it must
            be their number.

    Raises:
        LayoutError, UnsupportedModelError: the layouts, the model and the number of ranks do not fit.
        HubError: a hub id that is not to be had.
        CheckpointError: weights missing, unexpected or damaged.
    """

    def __new__(cls, *args: Any, num_gpus: int | None = None, **options: Any) -> Any:
        if num_gpus is None or detect().world_size > 1:
            return super().__new__(cls)
        from rl3d.engine.session_actor import SessionActor

        return SessionActor(*args, num_gpus=num_gpus, **options)

    def __init__(self, model: Any, tokenizer: Any = None, *, train: str | TrainLayout = "tp1.pp1.zero1",
                 gen: str | GenLayout = "tp1", order: str = "auto", dtype: str | torch.dtype = "auto",
                 device: str = "auto", use_flash_attention: bool = True, algorithm: PPOConfig | None = None,
                 max_sequence_length: int | None = None, max_sequences: int = 64, max_prefill_tokens: int = 8192,
                 cache_strategy: str = "adaptive", engine: str = "megatron",
                 engine_options: Mapping[str, Any] | None = None, staging_mib: int = 48, verify: bool = False,
                 transport: str = "auto", training_copy: str = "keep", sequence_parallel: bool = False,
                 recompute: str = "none", offload: str = "none", reference: bool | None = None,
                 reference_residency: str = "device", deepspeed: Mapping[str, Any] | None = None,
                 megatron: Mapping[str, Any] | None = None, seed: int = 0, timeout_s: float = 600,
                 num_gpus: int | None = None):  # fmt: skip
        deepspeed, megatron = dict(deepspeed or {}), dict(megatron or {})
        problems = passthrough_problems("deepspeed", deepspeed) + passthrough_problems("megatron", megatron)
        if problems:
            raise ConfigError(problems)
        self.runtime = bootstrap.init(timeout_s=timeout_s, device=device)
        if num_gpus not in (None, self.runtime.world_size):
            raise ValueError(f"num_gpus = {num_gpus}, but this job has {self.runtime.world_size} ranks; leave num_gpus out")
        self.algorithm = algorithm if algorithm is not None else PPOConfig(kl_coef=0.0)
        if reference is None:
            reference = self.algorithm.needs_reference
        if self.algorithm.needs_reference and not reference:
            raise ValueError(
                f"Actor(reference=False) with kl_coef = {self.algorithm.kl_coef}: the KL penalty needs the reference model; "
                f"leave reference out, or set kl_coef=0"
            )
        self.source: ModelSource = open_model(model, tokenizer, self.runtime)
        self.tokenizer = self.source.tokenizer
        if max_sequence_length is None:
            max_sequence_length = min(2048, Architecture.from_hf(self.source.directory).max_positions)
        train = train if isinstance(train, TrainLayout) else TrainLayout.parse(train)
        stage = zero_stage_from_fsdp(self.algorithm.fsdp_config)
        self.settings = ActorSettings(
            train=train if stage is None else replace(train, zero=stage),
            gen=gen if isinstance(gen, GenLayout) else GenLayout.parse(gen),
            order=None if order == "auto" else tuple(order.split("-")),  # type: ignore[arg-type]
            dtype=dtype_of(dtype, self.runtime.device),
            max_sequence_length=max_sequence_length,
            max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens, cache_strategy=cache_strategy,
            engine=engine, engine_options=dict(engine_options or {}), staging_bytes=staging_mib << 20,
            verify=verify, transport=transport, training_copy=training_copy, sequence_parallel=sequence_parallel,
            recompute=recompute, offload=offload, reference=reference, reference_residency=reference_residency,
            algorithm=self.algorithm, use_flash_attention=use_flash_attention, deepspeed=deepspeed, megatron=megatron,
        )  # fmt: skip
        self.seed, self._rollouts = seed, 0
        self.parts = assemble(self.source.directory, self.settings, self.runtime)
        self.hybrid = self.parts.hybrid
        self._remembered: list[_Remembered] = []
        self._lock = threading.RLock()
        self._channel = ControlChannel(
            self.runtime.new_store(), self.runtime.rank, self.runtime.world_size, self._lock,
            {"switch_to_generation": self.hybrid.switch_to_generation,
             "switch_to_training": self.hybrid.switch_to_training},
            self.runtime.timeout_s, name=f"actor{next(_actors)}",
        )  # fmt: skip
        self.runtime.before_leaving.append(self._channel.close)

    # ---- modes

    @property
    def is_generation_mode(self) -> bool:
        return self.hybrid.mode == GENERATION

    @property
    def is_training_mode(self) -> bool:
        return self.hybrid.mode == TRAINING

    def switch_to_generation(self) -> SwitchReport:
        """Move the weights into the generation layout; nothing to do when they are there. See :class:`SwitchReport`."""
        return self._channel.call("switch_to_generation")

    def switch_to_training(self) -> SwitchReport:
        """Return to the training layout; nothing to do when there."""
        return self._channel.call("switch_to_training")

    # ---- generation

    def sample(self, requests: Sequence[Request], on_finish: OnFinish | None = None,
               on_step: OnStep | None = None) -> list[Result]:  # fmt: skip
        """Sample *this replica's* requests, in generation mode; every rank of a replica passes the same ones.

        The building block of :meth:`generate`, :meth:`rollout` and the trainer's sampling flow. Ranks that do not
        generate get an empty list.
        """

        def run() -> list[Result]:
            if (generator := self.hybrid.generator) is None:
                return []
            generator.tokenizer = self.tokenizer
            return generator.generate(requests, on_finish, on_step)

        return self._channel.call("sample", run)

    def replica_share(self, count: int) -> range:
        """Which of ``count`` prompts this replica generates: contiguous, as even as possible."""
        groups = self.parts.gen_groups
        if groups is None:
            return range(0)
        return range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, max_new_tokens: int = 128,
                 temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                 stop_token_ids: Sequence[int] | None = None) -> Tensor:  # fmt: skip
        """Sample one response for each row, in generation mode, without gradients.

        Args:
            input_ids: [B, P]; padding at either end.
            attention_mask: [B, P]; without it, leading and trailing pad tokens are taken for padding.

        Returns:
            [B, P + R] token ids: the prompts as given, then the responses, right-padded.

        Raises:
            ModeError: in training mode.
        """
        self.hybrid.require(GENERATION, "generate")
        params = self._params(max_new_tokens, temperature, top_p, top_k, stop_token_ids)
        return self._sample_batch(input_ids, attention_mask, params)[0].sequences

    def rollout(self, input_ids: Tensor, attention_mask: Tensor | None = None, max_new_tokens: int = 128,
                temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                stop_token_ids: Sequence[int] | None = None) -> RolloutOutput:  # fmt: skip
        """Sample one response for each row, from either mode (which is restored). Arguments as :meth:`generate`."""
        was_training = self.is_training_mode
        if was_training:
            self.switch_to_generation()
        try:
            params = self._params(max_new_tokens, temperature, top_p, top_k, stop_token_ids)
            output, prompts = self._sample_batch(input_ids, attention_mask, params)
        finally:
            if was_training:
                self.switch_to_training()
        self._remembered = [*self._remembered[-7:], _Remembered(output, prompts, temperature)]
        return output

    def _params(self, max_new_tokens: int, temperature: float, top_p: float, top_k: int,
                stop: Sequence[int] | None) -> SamplingParams:  # fmt: skip
        ids = self.source.stop_token_ids if stop is None else tuple(stop)
        return SamplingParams(max_new_tokens, temperature, top_p, top_k, stop_token_ids=ids, seed=self.seed)

    def _sample_batch(self, input_ids: Tensor, attention_mask: Tensor | None,
                      params: SamplingParams) -> tuple[RolloutOutput, list[list[int]]]:  # fmt: skip
        pad = self.source.pad_token_id
        prompts = real_tokens(input_ids, attention_mask, pad)
        step, self._rollouts = self._rollouts, self._rollouts + 1
        share = self.replica_share(len(prompts))
        results = self.sample([Request(prompts[i], params, (step, i, 0)) for i in share])
        mine = {share[r.request_index]: r for r in results}
        every = list(gather_from_replicas(mine, self.parts.gen_groups, self.runtime.cpu_group).values())
        width = max((len(r.token_ids) for r in every), default=0)
        responses = torch.full((len(every), width), pad, dtype=torch.int64)
        logprobs = torch.zeros(len(every), width)
        mask = torch.zeros(len(every), width, dtype=torch.bool)
        for row, result in enumerate(every):
            n = len(result.token_ids)
            responses[row, :n] = torch.tensor(result.token_ids, dtype=torch.int64)
            logprobs[row, :n] = torch.tensor(result.logprobs)
            mask[row, :n] = True
        sequences = torch.cat([input_ids.cpu(), responses], dim=1).to(input_ids.device)
        reasons = [r.finish_reason for r in every]
        return RolloutOutput(sequences, logprobs.to(input_ids.device), mask.to(input_ids.device), reasons), prompts

    # ---- training

    def update(self, sequences: Tensor, rewards: Tensor, old_logprobs: Tensor, *, response_mask: Tensor | None = None,
               attention_mask: Tensor | None = None, temperature: float | None = None) -> dict[str, float]:  # fmt: skip
        """Learn from sampled sequences and their rewards, in training mode: clipped PPO without a critic.

        With ``algorithm.name="grpo"`` advantages are rewards relative to the other responses to the same prompt, or, when
        every prompt occurs once, relative to the whole batch. With ``"ppo"`` they are whitened returns: the actor alone
        has no critic, the trainer brings one.

        Args:
            sequences: [B, P + R], from :meth:`rollout` (the boundaries are then known) or of your own.
            rewards: [B]; a NaN leaves that sequence out.
            old_logprobs: [B, R] log-probabilities at sampling time.
            response_mask: [B, R] or [B, P + R]; required for sequences that did not come from :meth:`rollout`.
            attention_mask: [B, P + R], for padded prompts of your own.
            temperature: at which the sequences were sampled; known for own rollouts, otherwise 1.

        Returns:
            metrics, ``total_loss`` among them.

        Raises:
            ModeError: in generation mode.
            ValueError: shapes that do not fit, or foreign sequences without ``response_mask``.
        """
        self.hybrid.require(TRAINING, "update")
        known = next((m for m in reversed(self._remembered) if torch.equal(m.output.sequences, sequences)), None)
        if known is not None and response_mask is None:
            prompts = known.prompts
            spans = response_spans(sequences, known.output.response_mask)
            temperature = known.temperature if temperature is None else temperature
        elif response_mask is None:
            raise ValueError(
                "update(): these sequences did not come from this actor's rollout(); pass response_mask=[B, R], true on "
                "the response tokens"
            )
        else:
            spans = response_spans(sequences, response_mask)
            first = sequences.shape[1] - response_mask.shape[1]
            if response_mask.shape[1] == sequences.shape[1]:
                first = int(response_mask.int().argmax(dim=1).min())
            head_mask = None if attention_mask is None else attention_mask[:, :first]
            prompts = real_tokens(sequences[:, :first], head_mask, self.source.pad_token_id)
        samples = self._train_samples(prompts, spans, rewards, old_logprobs)
        size = self.algorithm.mini_batch_size
        mini_batches = [range(i, min(i + size, len(samples))) for i in range(0, len(samples), size)]
        metrics = self.learn(samples, mini_batches, 1.0 if temperature is None else temperature)
        return {**metrics, "total_loss": metrics["actor/total_loss"]}

    def _train_samples(self, prompts: list[list[int]], spans: list[list[int]], rewards: Tensor,
                       old_logprobs: Tensor) -> list[TrainSample]:  # fmt: skip
        if len(rewards) != len(spans) or len(old_logprobs) != len(spans):
            raise ValueError(
                f"update(): {len(spans)} sequences, {len(rewards)} rewards and {len(old_logprobs)} rows of old_logprobs; "
                f"expected one of each for every sequence"
            )
        ids: dict[tuple[int, ...], int] = {}
        group = torch.tensor([ids.setdefault(tuple(p), len(ids)) for p in prompts])
        if len(ids) == len(prompts):
            group = torch.zeros_like(group)
        scores = rewards.detach().float().cpu()
        advantages = grpo_advantages(scores, group, normalize_by_std=self.algorithm.norm_adv_by_std).tolist()
        valid = scores.isfinite().tolist()
        rows = old_logprobs.detach().float().cpu().tolist()
        return [
            TrainSample(prompt, span, advantage, row[: len(span)], ok, score)
            for prompt, span, advantage, row, ok, score in zip(prompts, spans, advantages, rows, valid, scores.tolist())
        ]

    def learn(self, samples: Sequence[TrainSample], mini_batches: Sequence[Sequence[int]], temperature: float,
              lr_of_step: Callable[[], float] | None = None, **hooks: Any) -> dict[str, float]:  # fmt: skip
        """Old log-probabilities, reference (if any), advantages and all optimiser steps; see :class:`PolicyUpdate`."""

        def run() -> dict[str, float]:
            update = self.policy_update(samples, mini_batches, temperature)
            metrics = update.old_logprobs()
            if self.parts.reference is not None:
                metrics |= update.reference_logprobs(self.parts.reference)
            metrics |= update.advantages()
            return metrics | update.step(
                lr_of_step or (lambda: self.algorithm.lr), on_step=self.hybrid.weights_changed, **hooks
            )

        return self._channel.call("update", run)

    def policy_update(self, samples: Sequence[TrainSample], mini_batches: Sequence[Sequence[int]],
                      temperature: float, config: PPOConfig | None = None) -> PolicyUpdate:  # fmt: skip
        """The passes of one update, to be run one by one (the trainer times each). ``config`` as in :meth:`check_fits`."""
        self.hybrid.require(TRAINING, "update")
        algorithm = self.algorithm if config is None else config
        return PolicyUpdate(self.parts.train, algorithm, samples, mini_batches, temperature, self.runtime.cpu_group)

    def check_fits(self, config: PPOConfig) -> None:
        """Raise :class:`ValueError` when this actor was built for another optimiser or without the reference it needs."""
        differs = [
            f"{name} = {getattr(config, name)} (the actor has {getattr(self.algorithm, name)})"
            for name in ("betas", "eps", "weight_decay", "max_grad_norm")
            if getattr(config, name) != getattr(self.algorithm, name)
        ]
        if config.needs_reference and self.parts.reference is None:
            differs.append(f"kl_coef = {config.kl_coef} needs a reference model, and the actor has none")
        if differs:
            raise ValueError(
                f"this actor was built for other settings: {'; '.join(differs)}; pass Actor(..., algorithm=config)"
            )

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a collective operation of your own in the actor's sequence of operations; every rank must call it."""
        return self._channel.call(name, run)

    # ---- the end

    def close(self) -> None:
        """Stop listening for calls of other ranks; the actor cannot switch afterwards. The job goes on."""
        self._channel.close()
