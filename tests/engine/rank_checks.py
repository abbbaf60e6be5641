"""Checks that run on four ranks; the numbers go back to the test that asserts on them."""

import itertools
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
from rl3d.models import Architecture
from rl3d.models.build import build_model, canonical_parameters
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


def train(runtime: Any, directory: str, out: str, layouts: list[list[int]], dtypes: list[str]) -> list[dict[str, Any]]:
    """Three optimiser steps at each layout; the exported weights and gradient norms go to ``out``."""
    bootstrap.init_deepspeed()
    registry = GroupRegistry(60)
    rows = []
    for tied, (tp, pp), dtype_name in itertools.product((False, True), layouts, dtypes):
        source = Path(directory) / ("tied" if tied else "untied")
        arch, dtype = Architecture.from_hf(source), getattr(torch, dtype_name)
        padded = arch.padded_vocab(4)
        groups = training_groups(Mesh(tp, pp, runtime.world_size // tp // pp), registry)
        model = build_model(arch, groups, padded_vocab=padded, dtype=dtype, device=runtime.device)
        import_hf(source, arch, padded, canonical_parameters(model, arch, groups), tp, groups.tp_rank)
        adam = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01, max_grad_norm=0.5)
        engine = TrainingEngine(model, arch, groups, stage=1, settings=adam, logprob_chunk=16)
        norms = []
        for step in range(3):
            batch = sequences(step)
            total = sum(int((s.weight != 0).sum()) for s in batch)
            mine = batch[groups.dp_rank :: groups.dp_size]
            micro = [packed(mine[:1]), packed(mine[1:3]), packed(mine[3:])]

            def loss(logprobs, entropy, row, total=total):
                return -(logprobs * row.values["weight"].to(logprobs.device)).sum() / total, {}

            norms.append(engine.train_step(micro, loss, TEMPERATURE).grad_norm)
        name = f"tp{tp}.pp{pp}-{'tied' if tied else 'untied'}-{dtype_name}"
        export_hf(Path(out) / name, source, arch, padded, engine.weights, groups, torch.float32)
        rows.append({
            "name": name, "tied": tied, "dtype": dtype_name, "norms": norms,
            "replicas": _replica_gap(engine.weights, arch, groups, registry, runtime),
        })  # fmt: skip
    return rows


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
