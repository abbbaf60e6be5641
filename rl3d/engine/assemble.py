"""Puts an actor together: arithmetic first, then groups, then modules, then weights.

Everything that can be wrong with a layout or a model is found before any weight is read.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.config import PPOConfig, zero_problem
from rl3d.distributed import bootstrap
from rl3d.distributed.bootstrap import Runtime
from rl3d.distributed.groups import GroupRegistry, ModelGroups, generation_groups, training_groups
from rl3d.engine.arena import Arena, alias_weights, house
from rl3d.engine.download import local_directory
from rl3d.engine.feed import WeightFeed
from rl3d.engine.hybrid import HybridEngine
from rl3d.engine.partitions import partition_layout
from rl3d.engine.roles import ForwardRole
from rl3d.engine.side import GenerationSide
from rl3d.engine.training import TrainingEngine
from rl3d.engine.vocabulary import Carried, put, take
from rl3d.engine.zero import AdamSettings, stage_run
from rl3d.generation.attention import CachedSelfAttention
from rl3d.generation.load import engine_problem, make_fed_engine
from rl3d.generation.megatron import MegatronGenerator
from rl3d.io.import_hf import import_hf
from rl3d.layout import GenLayout, GenMesh, LayoutError, Mesh, TrainLayout
from rl3d.layout.sharding import ShardLayout
from rl3d.models import Architecture, UnsupportedModelError, mapped_parameters
from rl3d.models.build import build_model, canonical_parameters, check_tensor_parallel
from rl3d.models.value import value_architecture
from rl3d.reshard.mapping import mesh_choices

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActorSettings:
    """What an actor is made of; :class:`rl3d.Actor` documents each."""

    train: TrainLayout = field(default_factory=TrainLayout)
    gen: GenLayout = field(default_factory=GenLayout)
    order: tuple[str, ...] | None = None
    dtype: torch.dtype = torch.float32
    max_sequence_length: int = 2048
    max_sequences: int = 64
    max_prefill_tokens: int = 8192
    cache_strategy: str = "adaptive"
    engine: str = "megatron"
    engine_options: dict[str, Any] = field(default_factory=dict)
    ready_engine: Any = None
    staging_bytes: int = 48 << 20
    verify: str = "off"
    transport: str = "auto"
    training_copy: str = "keep"
    gradients: str = "keep"
    optimizer_state: str = "keep"
    alias: str = "auto"
    defer_gather: bool = False
    sequence_parallel: bool = False
    recompute: str = "none"
    offload: str = "none"
    reference: bool = False
    reference_residency: str = "device"
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    use_flash_attention: bool = True
    deepspeed: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)


@dataclass
class CarriedModels:
    """Weights in host memory, and the size of the vocabulary that they are to have."""

    vocab_size: int
    policy: Carried
    reference: Carried | None


@dataclass
class ActorParts:
    """An assembled actor. ``gen_groups`` and the generator are ``None`` on ranks that do not generate.

    ``build(groups, arch, padded_vocab)`` makes this rank's part of another model under the actor's settings.
    """

    arch: Architecture
    padded_vocab: int
    groups: ModelGroups
    train: TrainingEngine
    hybrid: HybridEngine
    reference: ForwardRole | None
    mesh_order: tuple[str, ...]
    build: Callable[..., Any]

    @property
    def gen_groups(self) -> ModelGroups | None:
        """Where the current generation model lives."""
        return self.hybrid.side.groups


def assemble(directory: Path, settings: ActorSettings, runtime: Runtime, carried: CarriedModels | None = None) -> ActorParts:
    """Build and load everything. Collective over all ranks.

    Args:
        directory: configuration and weights.
        carried: take the weights from here, for a vocabulary of another size.

    Raises:
        LayoutError, UnsupportedModelError: the layouts, the model and the number of ranks do not fit together.
        CheckpointError: the weights do not match the configuration.
    """
    arch = Architecture.from_hf(directory)
    if carried is not None:
        arch = replace(arch, vocab_size=carried.vocab_size)
    train, gen, world = settings.train.resolve(runtime.world_size), settings.gen, runtime.world_size
    if (problem := zero_problem(train, settings.offload)) is not None:
        raise LayoutError(f"training layout {train}: {problem}")
    if train.zero == 3 and settings.training_copy == "drop":
        raise LayoutError(f"training layout {train}: zero3 has no whole weights to drop; use training_copy='keep'")
    if settings.sequence_parallel and train.tp == 1:
        raise LayoutError(f"training layout {train}: sequence_parallel splits the sequence over tp ranks; write tp2 or more")
    if (problem := engine_problem(settings.engine, gen.tp)) is not None:
        raise LayoutError(f"generation layout {gen}: {problem}")
    check_tensor_parallel(arch, train.tp, "layout.train")
    check_tensor_parallel(arch, gen.tp, "layout.gen")
    padded_vocab = arch.padded_vocab(train.tp, gen.tp)
    dtype_name = str(settings.dtype).removeprefix("torch.")
    mapped = mapped_parameters(arch, padded_vocab, dtype_name)
    specs = [m.spec for m in mapped]
    mesh, replicas = _meshes(specs, train, gen, settings.order, runtime)
    if settings.engine == "vllm":  # it groups consecutive ranks itself
        replicas = tuple(map(tuple, GenMesh(gen.tp, tuple(range(world))).groups()))
    source = ShardLayout.training(mesh, arch.num_layers, zero=train.zero, vpp=train.vpp)

    _, note = stage_run(train.zero, train.pp, settings.dtype == torch.bfloat16)
    if note and runtime.rank == 0:
        _log.warning("layout.train = %s: %s", train, note)
    bootstrap.init_deepspeed()
    registry = GroupRegistry.of(runtime, "model")
    groups = training_groups(mesh, registry, train.vpp)
    move_group = GroupRegistry.of(runtime, "move").all_of([tuple(range(world))])  # of its own: a listener may move

    device, dtype = runtime.device, settings.dtype

    def build(where: ModelGroups, arch: Architecture = arch, padded_vocab: int = padded_vocab, **options: Any) -> Any:
        options |= {"use_flash_attention": settings.use_flash_attention, "sequence_parallel": settings.sequence_parallel,
                    "recompute": settings.recompute, **settings.megatron}  # fmt: skip
        return build_model(arch, where, padded_vocab=padded_vocab, dtype=dtype, device=device, **options)

    def fill(model: Any, place: Path, weights: Carried | None) -> None:
        if weights is None:
            return _load(place, arch, padded_vocab, model, groups)
        put(weights, canonical_parameters(model, arch, groups), specs, arch.vocab_size, groups)

    model = build(groups)
    fill(model, directory, None if carried is None else carried.policy)
    reference = None
    if settings.reference:
        frozen = build(groups)
        other = settings.algorithm.reference_model
        if carried is not None and carried.reference is not None:
            fill(frozen, directory, carried.reference)
        elif other is None:
            with torch.no_grad():
                for copy, original in zip(frozen.parameters(), model.parameters(), strict=True):
                    copy.copy_(original)
        else:
            place = local_directory(other, runtime)
            if Architecture.from_hf(place) != arch:
                raise UnsupportedModelError(
                    f"algorithm.reference_model = {other}: its architecture differs from the policy's ({directory}); the "
                    f"reference runs in the policy's layout and must have its shape and vocabulary"
                )
            _load(place, arch, padded_vocab, frozen, groups)
        reference = ForwardRole(frozen, arch, groups, residency=settings.reference_residency, sharded=train.zero == 3,
                                logprob_chunk=settings.algorithm.logprob_chunk_tokens)  # fmt: skip
    algorithm = settings.algorithm
    adam = AdamSettings(algorithm.lr, algorithm.betas, algorithm.eps, algorithm.weight_decay, algorithm.max_grad_norm)
    engine = TrainingEngine(model, arch, groups, stage=train.zero, settings=adam, deepspeed=settings.deepspeed,
                            logprob_chunk=algorithm.logprob_chunk_tokens, offload=settings.offload,
                            defer_gather=settings.defer_gather)  # fmt: skip

    partitions = None
    if settings.defer_gather:
        partitions = partition_layout(engine, mesh, arch, specs, vpp=train.vpp, group=runtime.cpu_group)
    arena = Arena(device)
    shares = settings.alias == "auto" and settings.training_copy == "keep" and not settings.defer_gather

    def feed_side(where: ModelGroups | None, chosen: Sequence[tuple[int, ...]]) -> GenerationSide:
        """An engine with a model of its own. It cuts its own shards, so every rank takes the whole of each tensor."""
        fed = None
        if where is not None:
            fed = make_fed_engine(
                settings.engine, directory, where, device=device, dtype=dtype, max_sequences=settings.max_sequences,
                max_sequence_length=settings.max_sequence_length, max_prefill_tokens=settings.max_prefill_tokens,
                vocab_size=arch.vocab_size, options=settings.engine_options, ready=settings.ready_engine,
            )  # fmt: skip
        members = tuple(sorted(rank for replica in chosen for rank in replica))
        layout = ShardLayout.replicas(1, [(rank,) for rank in members], arch.num_layers)
        feed = WeightFeed(mapped, source, layout, engine.weights, None if fed is None else fed.load_weights,
                          rank=runtime.rank, group=move_group, device=device, staging_bytes=settings.staging_bytes,
                          nodes=runtime.nodes)  # fmt: skip
        return GenerationSide(members, layout, where, fed, {}, feed=feed)

    def make_side(ranks: Sequence[int] | None) -> GenerationSide:
        """Generation on ``ranks``, or on all. Collective."""
        chosen = replicas if ranks is None else GenMesh(gen.tp, tuple(ranks)).groups()
        layout = ShardLayout.replicas(gen.tp, chosen, arch.num_layers)
        where = generation_groups(chosen, registry)
        if settings.engine != "megatron":
            return feed_side(where, chosen)
        members = tuple(sorted(rank for replica in chosen for rank in replica))
        if where is None:
            return GenerationSide(members, layout, None, None, {})
        model = build(where, mode="generate", self_attention=CachedSelfAttention)
        aliases = alias_weights(specs, source, layout, runtime.rank, engine.local_weights) if shares else {}
        weights = house(canonical_parameters(model, arch, where), arena, aliases)
        generator = MegatronGenerator(
            model, where.tp, arch.vocab_size, max_sequences=settings.max_sequences,
            max_sequence_length=settings.max_sequence_length, device=device, dtype=dtype,
            max_prefill_tokens=settings.max_prefill_tokens, cache_strategy=settings.cache_strategy,
        )  # fmt: skip
        return GenerationSide(members, layout, where, generator, weights, frozenset(aliases))

    hybrid = HybridEngine(
        engine, make_side, arena, specs=specs, source=source, partitions=partitions, group=move_group, rank=runtime.rank,
        device=device, staging_bytes=settings.staging_bytes, nodes=runtime.nodes, verify=settings.verify,
        transport=settings.transport, training_copy=settings.training_copy, gradients=settings.gradients,
        optimizer_state=settings.optimizer_state,
    )  # fmt: skip
    return ActorParts(arch, padded_vocab, groups, engine, hybrid, reference, mesh.order, build)


def carry_out(parts: ActorParts, settings: ActorSettings, vocab_size: int) -> CarriedModels:
    """The weights of policy and reference in host memory, on their way into :func:`assemble`. Collective."""
    mapped = mapped_parameters(parts.arch, parts.padded_vocab, str(settings.dtype).removeprefix("torch."))
    specs = [m.spec for m in mapped]
    size, groups = parts.arch.vocab_size, parts.groups
    policy = take(parts.train.weights, specs, size, groups, parts.train.zero.shards_weights)
    reference = None
    if parts.reference is not None:
        with parts.reference.residency.resident():
            reference = take(parts.reference.shards, specs, size, groups, parts.train.zero.shards_weights)
    return CarriedModels(vocab_size, policy, reference)


def _meshes(specs: Sequence[Any], train: TrainLayout, gen: GenLayout, order: tuple[str, ...] | None,
            runtime: Runtime) -> tuple[Mesh, tuple[tuple[int, ...], ...]]:  # fmt: skip
    """The training mesh and the generation replicas between which the least has to move."""
    per_node = runtime.local_world_size if len(set(runtime.nodes)) > 1 else None
    best = min(mesh_choices(specs, train, gen, runtime.world_size, per_node, orders=None if order is None else [order]))
    return Mesh.of(train, runtime.world_size, best.order), best.gen_groups(gen.tp, runtime.world_size)


def load_value_model(directory: Path, parts: ActorParts, *, needs_head: bool = False) -> tuple[Any, Architecture, int]:
    """(model, architecture, padded vocabulary) of a value model in the actor's training layout. Collective.

    Raises:
        UnsupportedModelError: the layout cannot cut it, its vocabulary is not the actor's, or a head is needed that it
            has not.
        CheckpointError: the weights do not match the configuration.
    """
    arch, has_head = value_architecture(directory)
    groups = parts.groups
    if needs_head and not has_head:
        raise UnsupportedModelError(
            f"{directory}: a language model, without a head that scores; expected a ...ForSequenceClassification with one "
            f"label (architectures in its config.json)"
        )
    if arch.vocab_size != parts.arch.vocab_size:
        raise UnsupportedModelError(
            f"{directory}: vocabulary of {arch.vocab_size} tokens, the policy's has {parts.arch.vocab_size}; both read the "
            f"same token ids, so a critic or reward model needs the policy's tokenizer"
        )
    check_tensor_parallel(arch, groups.tp_size, f"layout.train with {directory}")
    model = parts.build(groups, arch, parts.padded_vocab)
    absent = () if has_head else ("value_head.weight", "value_head.bias")
    _load(directory, arch, parts.padded_vocab, model, groups, absent)
    return model, arch, parts.padded_vocab


def _load(directory: Path, arch: Architecture, padded_vocab: int, model: Any, groups: ModelGroups,
          absent: Collection[str] = ()) -> None:  # fmt: skip
    parameters = {n: p.data for n, p in canonical_parameters(model, arch, groups).items()}
    import_hf(directory, arch, padded_vocab, parameters, groups.tp_size, groups.tp_rank, absent)
    dist.barrier(group=groups.mp)
