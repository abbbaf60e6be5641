"""``Actor``: a language model that trains in one layout and generates in another, in one program."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl3d.config import ConfigError, PPOConfig, passthrough_problems, zero_stage_from_fsdp
from rl3d.distributed import bootstrap
from rl3d.distributed.control import ControlChannel
from rl3d.distributed.environment import detect
from rl3d.engine.assemble import ActorSettings, assemble, carry_out
from rl3d.engine.batches import real_tokens
from rl3d.engine.dtypes import dtype_of
from rl3d.engine.gather import gather_from_replicas
from rl3d.engine.growth import keep, restore
from rl3d.engine.hybrid import GENERATION, TRAINING, SwitchReport
from rl3d.engine.policy import PolicyUpdate, TrainSample
from rl3d.engine.rollout import Remembered, RolloutOutput, boundaries, train_samples
from rl3d.engine.saving import Saving
from rl3d.engine.source import ModelSource, open_model, with_tokenizer
from rl3d.engine.verification import check_level
from rl3d.engine.vocabulary import agreed_size, free_memory
from rl3d.generation.engine import GenerationError, OnFinish, OnStep, Request, Result, SamplingParams
from rl3d.generation.load import chosen_engine
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture

_actors = itertools.count()  # every rank makes its actors in the same order, so the numbers agree


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
            gen="tp1") and ``"vllm"`` (with options of ``vllm.LLM``), or into a ready vLLM (:class:`rl3d.VLLMActor`).
        use_vllm: True: ``engine="vllm"``; False: the built-in one.
        staging_mib: cap on the staging memory of a switch, MiB per direction.
        verify: compare fingerprints after each switch: ``"full"`` of every parameter, ``"sampled"`` of every 16th, others
            each time, or ``"off"`` (``True`` and ``False``: full and off).
        transport: ``"auto"``, ``"peer"``: ranks of a host read each other's memory (if they can, must); ``"p2p"``: messages.
        training_copy: ``"keep"``, or ``"drop"`` to give the training weights' memory back during generation.
        gradients: ``"keep"``, or ``"drop"`` to give the gradient buffers back during generation.
        optimizer_state: ``"keep"``, or ``"host"``: master weights and moments wait in host memory during generation.
        alias: ``"auto"``: generation reads weights that are contiguous pieces of this rank's training weights where they
            lie; ``"off"``: it has all weights in memory of its own.
        defer_gather: with zero1 and zero2, leave out the all-gather after the last optimiser step before generation.
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
                 cache_strategy: str = "adaptive", engine: Any = None, use_vllm: bool | None = None,
                 engine_options: Mapping[str, Any] | None = None, staging_mib: int = 48, verify: str | bool = "off",
                 transport: str = "auto", training_copy: str = "keep", gradients: str = "keep",
                 optimizer_state: str = "keep", alias: str = "auto", defer_gather: bool = False,
                 sequence_parallel: bool = False, recompute: str = "none", offload: str = "none",
                 reference: bool | None = None, reference_residency: str = "device",
                 deepspeed: Mapping[str, Any] | None = None, megatron: Mapping[str, Any] | None = None,
                 seed: int = 0, timeout_s: float = 600, num_gpus: int | None = None):  # fmt: skip
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
        engine, ready = chosen_engine(engine, use_vllm)
        self.settings = ActorSettings(
            train=train if stage is None else replace(train, zero=stage),
            gen=gen if isinstance(gen, GenLayout) else GenLayout.parse(gen),
            order=None if order == "auto" else tuple(order.split("-")),  # type: ignore[arg-type]
            dtype=dtype_of(dtype, self.runtime.device),
            max_sequence_length=max_sequence_length,
            max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens, cache_strategy=cache_strategy,
            engine=engine, ready_engine=ready, engine_options=dict(engine_options or {}), staging_bytes=staging_mib << 20,
            verify=check_level(verify), transport=transport, training_copy=training_copy, gradients=gradients,
            optimizer_state=optimizer_state, alias=alias, defer_gather=defer_gather, sequence_parallel=sequence_parallel,
            recompute=recompute, offload=offload, reference=reference, reference_residency=reference_residency,
            algorithm=self.algorithm, use_flash_attention=use_flash_attention, deepspeed=deepspeed, megatron=megatron,
        )  # fmt: skip
        self.seed, self._rollouts = seed, 0
        self.parts = assemble(self.source.directory, self.settings, self.runtime)
        self.hybrid = self.parts.hybrid
        self._own_tokenizer = False
        self._remembered: list[Remembered] = []
        self._lock = threading.RLock()
        self._channel = ControlChannel(
            self.runtime.new_store(), self.runtime.rank, self.runtime.world_size, self._lock,
            {"switch_to_generation": lambda **options: self.hybrid.switch_to_generation(**options),
             "switch_to_training": lambda: self.hybrid.switch_to_training()},
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

    def switch_to_generation(self, device_ids: Sequence[int] | None = None,
                             cache_strategy: str | None = None) -> SwitchReport:  # fmt: skip
        """Move the weights into the generation layout; nothing to do when they are there.

        Args:
            device_ids: ranks (one a GPU) that generate; the others are free for other work, and hold no generation weights.
                A multiple of the generation layout's tp; by default all ranks.
            cache_strategy: of the key/value cache from now on: ``"adaptive"``, ``"full"`` or ``"lightweight"``.

        Raises:
            ValueError: ranks or a strategy that cannot be.
            NonFiniteWeightsError, VerificationError, SwitchError: nothing was switched on any rank, and training goes on.
            ControlError: ranks made different calls, or a rank has gone (the message names it).
        """
        options: dict[str, Any] = {} if device_ids is None else {"device_ids": list(device_ids)}
        options |= {} if cache_strategy is None else {"cache_strategy": cache_strategy}
        return self._channel.call("switch_to_generation", **options)

    def switch_to_training(self, device_ids: Sequence[int] | None = None) -> SwitchReport:
        """Return to the training layout; nothing to do when there.

        Args:
            device_ids: training takes all ranks of its layout: they may be listed, and nothing else.

        Raises:
            ValueError: other ``device_ids``.
            VerificationError, SwitchError: nothing was switched on any rank, and generation goes on.
            ControlError: as for :meth:`switch_to_generation`.
        """
        world = self.runtime.world_size
        if device_ids is not None and sorted(device_ids) != list(range(world)):
            raise ValueError(
                f"switch_to_training(device_ids={list(device_ids)}): the training layout {self.settings.train} takes all "
                f"{world} ranks; leave device_ids out"
            )
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
                 stop_token_ids: Sequence[int] | None = None, stop: str | Sequence[str] = ()) -> Tensor:  # fmt: skip
        """Sample one response for each row, in generation mode, without gradients.

        Args:
            input_ids: [B, P]; padding at either end.
            attention_mask: [B, P]; without it, leading and trailing pad tokens are taken for padding.
            stop_token_ids: tokens that end a response and stay part of it; by default the model's own.
            stop: texts that end a response as well, however they fall into tokens; the token that completes one stays.

        Returns:
            [B, P + R] token ids: the prompts as given, then the responses, right-padded.

        Raises:
            ModeError: in training mode.
            GenerationError: a sampling parameter that cannot be, or stop texts without a tokenizer.
        """
        self.hybrid.require(GENERATION, "generate")
        params = self._params(max_new_tokens, temperature, top_p, top_k, stop_token_ids, stop)
        return self._sample_batch(input_ids, attention_mask, params)[0].sequences

    def rollout(self, input_ids: Tensor, attention_mask: Tensor | None = None, max_new_tokens: int = 128,
                temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                stop_token_ids: Sequence[int] | None = None, stop: str | Sequence[str] = ()) -> RolloutOutput:  # fmt: skip
        """Sample one response for each row, from either mode (which is restored). Arguments as :meth:`generate`."""
        params = self._params(max_new_tokens, temperature, top_p, top_k, stop_token_ids, stop)
        was_training = self.is_training_mode
        if was_training:
            self.switch_to_generation()
        try:
            output, prompts = self._sample_batch(input_ids, attention_mask, params)
        finally:
            if was_training:
                self.switch_to_training()
        self._remembered = [*self._remembered[-7:], Remembered(output, prompts, temperature)]
        return output

    def _params(self, max_new_tokens: int, temperature: float, top_p: float, top_k: int, ids: Sequence[int] | None,
                stop: str | Sequence[str]) -> SamplingParams:  # fmt: skip
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if texts and self.tokenizer is None:
            raise GenerationError(f"stop = {texts!r} needs the text of what is drawn, and there is no tokenizer in "
                                  f"{self.source.directory}; give Actor(tokenizer=...), or use stop_token_ids")  # fmt: skip
        ids = self.source.stop_token_ids if ids is None else tuple(ids)
        return SamplingParams(max_new_tokens, temperature, top_p, top_k, tuple(ids), seed=self.seed, stop=texts)

    def _sample_batch(self, input_ids: Tensor, attention_mask: Tensor | None,
                      params: SamplingParams) -> tuple[RolloutOutput, list[list[int]]]:  # fmt: skip
        pad = self.source.pad_token_id
        prompts = real_tokens(input_ids, attention_mask, pad)
        step, self._rollouts = self._rollouts, self._rollouts + 1
        share = self.replica_share(len(prompts))
        results = self.sample([Request(prompts[i], params, (step, i, 0)) for i in share])
        mine = {share[r.request_index]: r for r in results}
        every = list(gather_from_replicas(mine, self.parts.gen_groups, self.runtime.cpu_group).values())
        return RolloutOutput.of(every, input_ids, pad), prompts

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
        prompts, spans, sampled_at = boundaries(
            self._remembered, sequences, response_mask, attention_mask, self.source.pad_token_id
        )
        temperature = sampled_at if temperature is None else temperature
        samples = train_samples(prompts, spans, rewards, old_logprobs, self.algorithm.norm_adv_by_std)
        size = self.algorithm.mini_batch_size
        mini_batches = [range(i, min(i + size, len(samples))) for i in range(0, len(samples), size)]
        metrics = self.learn(samples, mini_batches, temperature)
        return {**metrics, "total_loss": metrics["actor/total_loss"]}

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

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer, with more tokens perhaps. Collective, in training mode; every rank must call it.

        When it has more tokens than the model's vocabulary, embedding and output projection grow in every layout, and
        reference and generation with them: new rows are the mean of the old ones. The optimiser's state stays: moments of
        new rows start at zero. A critic or reward model must be made afterwards.

        Raises:
            ModeError: in generation mode.
            ValueError: tokenizers of different sizes on the ranks.
        """

        def run() -> None:
            self.hybrid.require(TRAINING, "set_tokenizer")
            size = agreed_size(len(tokenizer), self.runtime.cpu_group)
            if size > self.parts.arch.vocab_size:
                if self.settings.engine != "megatron":
                    raise ValueError(f"set_tokenizer(): engine = {self.settings.engine!r} has a model of its own, whose "
                                     f"vocabulary stays; use engine='megatron'")  # fmt: skip
                carried, kept = carry_out(self.parts, self.settings, size), keep(self.parts.train)
                before = self.parts.arch.vocab_size
                del self.parts, self.hybrid  # before their successors need the memory
                free_memory()
                self.parts = assemble(self.source.directory, self.settings, self.runtime, carried)
                restore(self.parts.train, kept, before)
                self.hybrid = self.parts.hybrid
            self.tokenizer, self._own_tokenizer = tokenizer, True
            self.source = with_tokenizer(self.source, tokenizer)

        self._channel.call("set_tokenizer", run)

    # ---- the end

    def close(self) -> None:
        """Stop listening for calls of other ranks; the actor cannot switch afterwards. The job goes on."""
        self._channel.close()
