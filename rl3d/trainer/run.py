"""A run from its configuration: what ``rl3d train`` does in each rank, and ``rl3d export`` afterwards."""

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl3d.config import RunConfig, check, load_config, model_dir, random_config, resolve
from rl3d.config.base import ConfigError, Problem
from rl3d.config.sections import RewardFunction
from rl3d.data.dataset import PromptDataset, PromptStream
from rl3d.data.sources import load_rows
from rl3d.data.tiny import make_drawn_model, make_tiny_model
from rl3d.data.tokenizers import load_tokenizer
from rl3d.distributed import bootstrap, failures
from rl3d.distributed.bootstrap import Runtime
from rl3d.distributed.launcher import STOPPED
from rl3d.engine.actor import Actor
from rl3d.engine.download import local_directory
from rl3d.estimate.memory import MemoryPlan
from rl3d.models.support import refuse_unsupported
from rl3d.rewards.functions import resolve_reward
from rl3d.rewards.http import HttpReward
from rl3d.rewards.models import ModelReward
from rl3d.rewards.runner import RewardRunner
from rl3d.trainer import checkpoint
from rl3d.trainer.memory import check_memory
from rl3d.trainer.trainer import RLTrainer


def main(config: RunConfig) -> int:
    """Train as ``config`` (resolved and checked) says, in this rank. Returns the exit code: :data:`STOPPED` for a run that
    was asked to stop and goes on when it is started again."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    runtime = bootstrap.init(timeout_s=config.trainer.timeout_s, device=config.layout.device)
    memory_plan = check_memory(config, runtime)  # all ranks agree: refused without a guard, a message and no traceback
    with failures.guard(runtime):
        trainer = build(config, memory_plan)
        trainer.train()
    return STOPPED if trainer.stopped else 0


def resolve_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, resolve for the ranks that exist, and check a configuration file."""
    from rl3d.distributed.environment import detect

    config = resolve(load_config(path, overrides), world_size=detect().world_size)
    refuse_unsupported(config, check(config))
    return config


def build(config: RunConfig, memory_plan: MemoryPlan | None = None) -> RLTrainer:
    """Everything that a configuration describes, in this rank. Collective. ``memory_plan``: of :func:`check_memory`, which
    is asked here if it was not before."""
    runtime = bootstrap.init(timeout_s=config.trainer.timeout_s, device=config.layout.device)
    _deterministic(config)
    memory_plan = memory_plan or check_memory(config, runtime)
    run_dir = config.run_dir
    if runtime.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config.to_yaml())
    directory = _model(config, runtime)
    remote_code = config.model.trust_remote_code
    tokenizer = load_tokenizer(
        local_directory(config.model.tokenizer, runtime, "tokenizer", remote_code=remote_code)
        if config.model.tokenizer
        else directory,
        trust_remote_code=remote_code,
    )
    stream = _stream(config, tokenizer)
    if config.rollout.stop and tokenizer is None:
        raise ConfigError(Problem("rollout.stop", "texts need a tokenizer; give model.tokenizer", config.rollout.stop))
    actor, algorithm = build_actor(config, directory, tokenizer), config.algorithm
    reward = config.reward
    functions = [(_reward(config, term, actor), term.weight) for term in reward.terms]
    rewards = RewardRunner(functions, workers=reward.workers, timeout_s=reward.timeout_s,
                           max_failure_rate=reward.max_failure_rate)  # fmt: skip
    if runtime.rank == 0:
        print(_opening(config, actor), flush=True)
    return RLTrainer(actor, tokenizer, stream, algorithm, rewards, rollout=config.rollout, trainer=config.trainer,
                     run_config=config, memory_plan=memory_plan)  # fmt: skip


def build_actor(config: RunConfig, directory: Path, tokenizer: Any) -> Actor:
    """The actor of a configuration, from the weights in ``directory``. Collective."""
    layout, algorithm = config.layout, config.algorithm
    assert config.model.max_sequence_length is not None
    return Actor(
        directory, tokenizer, train=layout.train, gen=layout.gen, order=layout.order, dtype=config.model.dtype,
        device=layout.device, algorithm=algorithm, max_sequence_length=config.model.max_sequence_length,
        max_sequences=config.rollout.max_sequences, max_prefill_tokens=config.rollout.max_batch_tokens,
        cache_strategy=config.rollout.cache_strategy, engine=config.rollout.engine,
        engine_options=config.rollout.vllm,
        staging_mib=layout.staging_mib, verify=layout.verify, transport=layout.transport,
        training_copy=layout.training_copy, gradients=layout.gradients, optimizer_state=layout.optimizer_state,
        alias=layout.alias, defer_gather=layout.defer_gather, sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        offload=layout.offload, use_flash_attention=config.model.attention == "auto",
        reference=algorithm.needs_reference,
        reference_residency=algorithm.reference_residency, deepspeed=config.deepspeed, megatron=config.megatron,
        seed=config.trainer.seed, timeout_s=config.trainer.timeout_s,
    )  # fmt: skip


def _reward(config: RunConfig, term: RewardFunction, actor: Actor) -> Any:
    """One reward of the configuration; models are read by the ranks that score, the leaders of the replicas."""
    if term.function is not None:
        return resolve_reward(term.function, term.kwargs)
    if term.url is not None:
        return HttpReward(
            term.url, timeout_s=term.timeout_s or config.reward.timeout_s, retries=term.retries, kwargs=term.kwargs,
            concurrency=term.concurrency, batch_size=term.samples_per_request, headers=term.headers,
        )  # fmt: skip
    assert term.model is not None
    remote_code = config.model.trust_remote_code
    device = torch.device("cpu") if term.device == "cpu" else actor.runtime.device
    model = ModelReward(
        local_directory(term.model, actor.runtime, remote_code=remote_code), name=term.model, residency=term.residency,
        device=device, dtype=torch.float32 if device.type == "cpu" else actor.settings.dtype,
        system_prompt=config.data.system_prompt, trust_remote_code=remote_code,
    )  # fmt: skip
    groups = actor.parts.gen_groups
    return model.load() if groups is not None and groups.tp_rank == 0 else model


def _opening(config: RunConfig, actor: Actor) -> str:
    """What is about to run, in a few lines a person can check."""
    arch, certificate = actor.parts.arch, actor.hybrid.plan.certificate.to_json()
    train = actor.settings.train.resolve(actor.runtime.world_size)
    replicas = actor.settings.gen.replicas(actor.runtime.world_size)
    return "\n".join([
        f"{arch.family}, {arch.num_parameters / 1e6:.1f}M parameters, {config.model.dtype} on {actor.runtime.device.type}, "
        f"{actor.runtime.world_size} ranks",
        f"train {train} → generate {actor.settings.gen} × {replicas}: a switch brings each rank "
        f"{certificate['received_mean'] / 1e6:.1f} MB (bound {certificate['bound_mean'] / 1e6:.1f} MB)",
        f"run directory {config.run_dir}",
    ])  # fmt: skip


def _deterministic(config: RunConfig) -> None:
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)


def _model(config: RunConfig, runtime: Runtime) -> Path:
    """Directory of the initial weights; of a hub id fetched by the first rank of each node, random ones by rank 0."""
    if config.model.path is not None:
        given = model_dir(config) or config.model.path
        return local_directory(given, runtime, remote_code=config.model.trust_remote_code)
    assert config.model.random is not None
    directory = config.run_dir / "model"
    if runtime.rank == 0 and not (directory / "config.json").is_file():
        random = config.model.random
        make = make_drawn_model if isinstance(random.config, str) else make_tiny_model
        make(directory, random_config(random.config), random.seed)
    runtime.barrier()
    return directory


def _stream(config: RunConfig, tokenizer: Any) -> PromptStream:
    data = config.data
    assert data.seed is not None
    rows = load_rows(data.train, size=data.size, seed=data.seed, prompt_key=data.prompt_key)
    dataset = PromptDataset(
        rows, tokenizer, system_prompt=data.system_prompt, chat_template=data.chat_template,
        max_prompt_tokens=data.max_prompt_tokens, drop_too_long=data.drop_too_long,
    )  # fmt: skip
    return PromptStream(dataset, config.algorithm.batch_size, shuffle=data.shuffle, seed=data.seed)


def export(source: str | Path, directory: str | Path) -> None:
    """Copy the weights of a checkpoint, or of a run's newest one, to a Hugging Face directory of their own.

    Raises:
        ConfigError: ``source`` is neither a run nor a checkpoint, or ``directory`` holds files already.
    """
    source, directory = Path(source), Path(directory)
    try:
        found = checkpoint.find(source, str(source))
    except checkpoint.ResumeError as error:
        raise ConfigError(str(error)) from None
    assert found is not None
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; give a new directory")
    shutil.copytree(found / checkpoint.WEIGHTS, directory, dirs_exist_ok=True)
    print(f"{found} -> {directory}")
