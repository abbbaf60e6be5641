"""Checks that run on four ranks; the numbers go back to the test that asserts on them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry, training_groups
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.training import TrainingEngine
from rl3d.engine.vocab_parallel import token_logprobs
from rl3d.engine.zero import AdamSettings
from rl3d.io import export_hf, import_hf
from rl3d.layout import Mesh
from rl3d.models import Architecture, parameter_specs
from rl3d.models.build import build_model, canonical_parameters
from tests.engine.cases import BUCKET, Case
from tests.reference import Sequence, sequences

TEMPERATURE = 0.7


def packed(batch: list[Sequence]) -> MicroBatch:
    """Several sequences in one row."""
    select, start = [], 0
    for s in batch:
        select.append(torch.arange(start + s.prompt - 1, start + len(s.tokens) - 1))
        start += len(s.tokens)
    return MicroBatch(
        torch.cat([s.tokens for s in batch]),
        torch.cat([torch.arange(len(s.tokens)) for s in batch]),
        tuple(len(s.tokens) for s in batch),
        torch.cat(select),
        torch.cat([s.tokens[s.prompt :] for s in batch]),
        {"weight": torch.cat([s.weight for s in batch])},
    )


def main(runtime: Any, **arguments: Any) -> dict[str, Any]:
    return {"rows": train(runtime, **arguments), "logprobs": vocabulary(runtime)}


def vocabulary(runtime: Any) -> dict[str, float]:
    """Log-probabilities, entropy and their gradients with 253 of 256 columns over four ranks, against torch in float64."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(37, 24, generator=generator)
    weight = torch.randn(256, 24, generator=generator)
    labels = torch.randint(0, 253, (37,), generator=generator)
    up = torch.randn(2, 37, generator=generator)

    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax((h @ w[:253].t()) / 0.7, -1)
    expected = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    ((expected[0] * up[0]).sum() + (expected[1] * up[1]).sum()).backward()

    mine = slice(runtime.rank * 64, runtime.rank * 64 + 64)
    h_local, w_local = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    found = token_logprobs(h_local, w_local, labels, vocab_size=253, temperature=0.7, group=None, chunk=8)
    ((found[0] * up[0]).sum() + (found[1] * up[1]).sum()).backward()

    def gap(a: torch.Tensor, b: torch.Tensor) -> float:
        worst = ((a.double() - b).abs().max() / b.abs().max()).reshape(1)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    return {
        "logprobs": gap(found[0].detach(), expected[0].detach()),
        "entropy": gap(found[1].detach(), expected[1].detach()),
        "hidden": gap(h_local.grad, h.grad),
        "weight": gap(w_local.grad, w.grad[mine]) if runtime.rank < 3 else gap(w_local.grad[:61], w.grad[192:253]),
        "pad": float(w_local.grad[61:].abs().max()) if runtime.rank == 3 else 0.0,
    }  # fmt: skip


def train(runtime: Any, directory: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three optimiser steps for each case, compared with the single-process reference in ``directory``."""
    bootstrap.init_deepspeed()
    registry = GroupRegistry(60)
    return [_train(runtime, registry, Path(directory), Case(**case)) for case in cases]


def _train(runtime: Any, registry: GroupRegistry, root: Path, case: Case) -> dict[str, Any]:
    source = root / case.source
    arch, dtype = Architecture.from_hf(source), getattr(torch, case.dtype)
    padded = arch.padded_vocab(4)
    groups = training_groups(Mesh(case.tp, case.pp, runtime.world_size // case.tp // case.pp), registry)
    model = build_model(arch, groups, padded_vocab=padded, dtype=dtype, device=runtime.device,
                        sequence_parallel=case.sp, recompute=case.recompute)  # fmt: skip
    import_hf(source, arch, padded, canonical_parameters(model, arch, groups), case.tp, groups.tp_rank)
    adam = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01, max_grad_norm=0.5)
    # a threshold of 0: at stage 3 the small parameters are sharded, too
    deepspeed = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": BUCKET}}
    engine = TrainingEngine(model, arch, groups, stage=case.zero, settings=adam, deepspeed=deepspeed, logprob_chunk=16,
                            offload=case.offload)  # fmt: skip
    held = engine.weights
    sizes = [torch.Size(s.local_shape(case.tp)).numel() for s in parameter_specs(arch, padded) if s.name in held]
    engine.zero.watch_gradients()
    norms, skipped = [], False
    for step in range(3):
        batch = sequences(step)
        total = sum(int((s.weight != 0).sum()) for s in batch)
        mine = batch[groups.dp_rank :: groups.dp_size]
        rows = [mine[:1], mine[1:3], mine[3:4], mine[4:]] if case.packed else [[s] for s in mine]
        if case.packed and groups.dp_rank == 1:  # fewer micro-batches than the other ranks have
            rows = [mine]

        def loss(logprobs, entropy, row, total=total):
            return -(logprobs * row.values["weight"].to(logprobs.device)).sum() / total, {}

        micro = [packed(row) for row in rows if row]
        if step == 2:  # a gradient that is not finite, on one rank: nothing happens, on all of them
            first = groups.dp_rank == groups.tp_rank == 0
            factor = float("nan") if first else 1.0
            bad = engine.train_step(micro, lambda *a, ok=loss, f=factor: (ok(*a)[0] * f, {}), TEMPERATURE)
            skipped = not bad.stepped
        norms.append(engine.train_step(micro, loss, TEMPERATURE).grad_norm)
    out = root / "out" / case.name
    export_hf(out, source, arch, padded, engine.weights, groups, torch.float32, flat_shards=engine.zero.shards_weights)
    expected, expected_norms = torch.load(root / f"{source.name}-{case.dtype}.pt")
    worst = l2 = moved = 0.0
    if runtime.rank == 0:
        worst, l2 = _compare(_read(out), expected)
        _, moved = _compare(_read(source), expected)
    return {
        "name": case.name, "tied": case.tied, "dtype": case.dtype, "error": worst, "l2": l2, "moved": moved,
        "skipped": skipped,
        "norm_error": max(abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)),
        "replicas": 0.0 if engine.zero.shards_weights else _replica_gap(engine.weights, arch, groups, registry, runtime),
        "gradient_bytes": engine.zero.peak_gradient_bytes, "parameters": sum(sizes), "largest": max(sizes),
    }  # fmt: skip


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest error of a tensor relative to its largest weight, and the L2 error of all relative to their norm."""
    expected = {k: v for k, v in expected.items() if k in found or k != "lm_head.weight"}  # tied: written once
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst = max(float((found[k] - v).abs().max() / v.abs().max()) for k, v in expected.items())
    flat, got = (torch.cat([t[k].flatten() for k in expected]) for t in (expected, found))
    return worst, float((got - flat).norm() / flat.norm())


def _replica_gap(weights: dict[str, torch.Tensor], arch: Architecture, groups: Any, registry: Any, runtime: Any) -> float:
    """Largest difference between copies of the same shard: over dp, over tp where replicated, tied ends over pp."""
    gap = 0.0
    for name, value in weights.items():
        replicated = [groups.dp]
        if "norm" in name:
            replicated.append(groups.tp)
        if name.startswith("embedding") and arch.tied and groups.pp_size > 1:
            replicated.append(groups.embd)
        for group in replicated:
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
            gap = max(gap, float((high - low).abs().max()))
    worst = torch.tensor([gap])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=runtime.cpu_group)
    return float(worst)
