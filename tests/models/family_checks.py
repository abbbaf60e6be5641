"""Families on four ranks; what was found goes into files or back to test_families.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor
from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry, ModelGroups, generation_groups, training_groups
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.training import TrainingEngine
from rl3d.engine.zero import AdamSettings
from rl3d.generation.attention import CachedSelfAttention
from rl3d.generation.body import make_body
from rl3d.generation.engine import Request, Result, SamplingParams
from rl3d.generation.megatron import MegatronGenerator
from rl3d.generation.scheduler import Chunk, RunningSequence
from rl3d.io import export_hf, import_hf
from rl3d.layout import GenMesh, Mesh, TrainLayout
from rl3d.models import Architecture
from rl3d.models.build import build_model, canonical_parameters
from tests.engine.rank_checks import TEMPERATURE, packed
from tests.ranks import rank_device
from tests.reference import sequences

PAD = 4  # every tensor-parallel size of the test divides it


def main(runtime: Any, directory: str, out: str, prompts: list[list[int]], new_tokens: int,
         generate: dict[str, list[str]], train: list[tuple[str, str]], actors: list[tuple[str, str, str]],
         ) -> dict[str, Any]:  # fmt: skip
    """``generate``: tp -> models; ``train``: (model, layout); ``actors``: (model, layout, generation layout).

    Returns facts by "model-tp", "model-layout" and "model-layout-gen"; logits and exports go to ``out``.
    """
    bootstrap.init_deepspeed()
    registry = GroupRegistry(runtime.timeout_s)
    root, facts = Path(directory), {}
    for tp, names in generate.items():
        replicas = GenMesh(int(tp), tuple(range(runtime.world_size))).groups()
        groups = generation_groups(replicas, registry)
        assert groups is not None
        mine = {}
        for name in names[groups.dp_rank :: groups.dp_size]:  # replicas share the models
            mine[f"{name}-{tp}"] = generation(root / name, groups, prompts, new_tokens, Path(out) / f"{name}-{tp}")
        everyone: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(everyone, mine)
        for found in everyone:
            for key, value in found.items():
                assert facts.setdefault(key, value) == value, f"{key}: the ranks of a replica disagree"
    for name, layout in train:
        facts[f"{name}-{layout}"] = training(root / name, layout, registry, prompts, Path(out) / f"{name}-{layout}")
    for name, layout, gen in actors:
        facts[f"{name}-{layout}-{gen}"] = switching(root / name, layout, gen, prompts[-1])
    return facts


def _loaded(source: Path, groups: ModelGroups, **options: Any) -> tuple[Any, Architecture, int]:
    arch = Architecture.from_hf(source)
    padded = arch.padded_vocab(PAD)
    model = build_model(arch, groups, padded_vocab=padded, dtype=torch.float32, device=rank_device(), **options)
    import_hf(source, arch, padded, canonical_parameters(model, arch, groups), groups.tp_size, groups.tp_rank)
    return model, arch, padded


@torch.no_grad()
def generation(source: Path, groups: ModelGroups, prompts: list[list[int]], new: int, out: Path) -> dict[str, Any]:
    """Greedy and drawn tokens with their log-probabilities; the logits of whole prompts, by each body, go to ``out``."""
    model, arch, _ = _loaded(source, groups, mode="generate", self_attention=CachedSelfAttention)
    settings = {"max_sequences": 6, "max_sequence_length": 1200, "page_size": 16, "pages": 450}
    generator = MegatronGenerator(model, groups.tp, arch.vocab_size, device=rank_device(), dtype=torch.float32, **settings)
    generator.weights_version = 0
    greedy = [Request(p, SamplingParams(new, temperature=0.0)) for p in prompts]
    drawn = [Request(p, SamplingParams(new, temperature=1.0, seed=3), key=(0, i, 0)) for i, p in enumerate(prompts)]
    results = generator.generate(greedy + drawn)
    logits, size, first = {}, generator.cache.page_size, 1
    chunks = []
    for prompt in prompts:
        pages = list(range(first, first + -(-len(prompt) // size)))
        sequence = RunningSequence(prompt, SamplingParams(1), 0, frozenset(), Result(0), pages=pages)
        chunks.append(Chunk(sequence, 0, prompt, True))
        first += len(pages)
    for kind in ("auto", "megatron"):
        generator.cache.allocate()
        generator.context.plan_prefill(chunks)
        body = make_body(model, generator.context, generator.group, kind)
        mine = body.forward(torch.tensor([t for p in prompts for t in p], device=rank_device()), None)
        parts = [torch.empty_like(mine) for _ in range(groups.tp_size)]
        dist.all_gather(parts, mine.contiguous(), group=groups.tp)
        logits[kind] = torch.cat(parts, -1)[:, : arch.vocab_size].cpu()
    if groups.tp_rank == 0:
        torch.save(logits, out.with_suffix(".pt"))
    return {
        "tokens": [r.token_ids for r in results], "logprobs": [r.logprobs for r in results],
        "close": sum(r.small_margins for r in results), "body": type(generator.body).__name__,
    }  # fmt: skip


def training(source: Path, text: str, registry: GroupRegistry, prompts: list[list[int]], out: Path) -> dict[str, Any]:
    """Log-probabilities of every token; the weights exported untouched, then after three optimiser steps.

    ``text``: a layout, then ``+sp`` for sequence parallelism, ``+selective`` or ``+full`` for recomputed activations.
    """
    plain, *marks = text.split("+")
    layout = TrainLayout.parse(plain).resolve(dist.get_world_size())
    assert layout.dp is not None
    groups = training_groups(Mesh(layout.tp, layout.pp, layout.dp), registry)
    recompute = next((mark for mark in marks if mark != "sp"), "none")
    model, arch, padded = _loaded(source, groups, sequence_parallel="sp" in marks, recompute=recompute)
    adam = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01, max_grad_norm=0.5)
    engine = TrainingEngine(model, arch, groups, stage=layout.zero, settings=adam, logprob_chunk=64)
    flat = engine.zero.shards_weights
    facts: dict[str, Any] = {"logprobs": _every_logprob(engine, prompts)}
    export_hf(out / "before", source, arch, padded, engine.weights, groups, torch.float32, flat_shards=flat)
    facts["norms"] = [_step(engine, groups, step) for step in range(3)]
    export_hf(out / "after", source, arch, padded, engine.weights, groups, torch.float32, flat_shards=flat)
    facts["copies"] = _copies_gap(engine.weights, groups)
    return facts


def switching(source: Path, layout: str, gen: str, prompt: list[int]) -> dict[str, Any]:
    """An actor's round: rollout, update, and the moves in between, each proved by fingerprints."""
    actor = Actor(source, train=layout, gen=gen, verify=True)
    greedy = actor.rollout(torch.tensor([prompt, prompt[::-1]]), max_new_tokens=8, temperature=0.0, stop_token_ids=[])
    before = actor.hybrid.generation_fingerprints()  # weights that lie in the training copy change with it
    metrics = actor.update(greedy.sequences, torch.tensor([1.0, 0.0]), greedy.logprobs, temperature=1.0)
    actor.switch_to_generation()
    after = actor.hybrid.generation_fingerprints()
    actor.switch_to_training()
    return {
        "parameters": len(before), "changed": sum(a != b for a, b in zip(before.values(), after.values(), strict=True)),
        "against_training": metrics["training/rollout_logprobs_diff_max"],
    }  # fmt: skip


def _every_logprob(engine: TrainingEngine, prompts: list[list[int]]) -> list[float]:
    """Prompts packed into one row; on the last stage, sent to rank 0."""
    tokens = [torch.tensor(p) for p in prompts]
    starts = torch.tensor([0] + [len(p) for p in prompts]).cumsum(0).tolist()
    row = MicroBatch(
        torch.cat(tokens), torch.cat([torch.arange(len(t)) for t in tokens]), tuple(len(t) for t in tokens),
        torch.cat([torch.arange(a, a + len(t) - 1) for a, t in zip(starts, tokens)]), torch.cat([t[1:] for t in tokens]),
    )  # fmt: skip
    found = engine.logprobs([row], 1.0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found[0][0].tolist() if found else None)
    answers = [a for a in everyone if a is not None]
    assert all(a == answers[0] for a in answers), "the ranks of the last stage disagree"
    return answers[0]


def _step(engine: TrainingEngine, groups: ModelGroups, step: int) -> float:
    batch = sequences(step)
    total = sum(int((s.weight != 0).sum()) for s in batch)
    mine = batch[groups.dp_rank :: groups.dp_size]
    micro = [packed(mine[:1]), packed(mine[1:3]), packed(mine[3:])]

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(logprobs * row.values["weight"]).sum() / total, {}

    return engine.train_step([m for m in micro if m.lengths], loss, TEMPERATURE).grad_norm


def _copies_gap(weights: dict[str, torch.Tensor], groups: ModelGroups) -> float:
    """Largest difference between the copies of the norms' weights on tensor-parallel ranks."""
    gap = torch.zeros(())
    for name, value in weights.items():
        if "norm" in name:
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=groups.tp)
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=groups.tp)
            gap = torch.maximum(gap, (high - low).abs().max())
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)
