"""What must not depend on the layout or the split of a batch, on four ranks; test_invariance.py asserts on the facts."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.algorithms.aggregation import MODES
from rl3d.config import PPOConfig
from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry
from rl3d.engine.policy import PolicyUpdate, TrainSample
from rl3d.engine.vocab_parallel import token_logprobs
from rl3d.io import export_hf
from tests.engine.engines import Built, build_engine
from tests.engine.rank_checks import TEMPERATURE, packed
from tests.reference import sequences

ORDERS = ([0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 3, 6, 1, 4])


def main(runtime: Any, directory: str, layouts: list[str], skipping: list[list[str]], norms: list[list[str]]) -> dict:
    bootstrap.init_deepspeed()
    registry, root = GroupRegistry(60), Path(directory)
    return {
        "updates": [fact for layout in layouts for fact in updates(runtime, registry, root, layout)],
        "skipped": [skipped(runtime, registry, root, *case) for case in skipping],
        "norms": {"-".join(case): norm_of_known_gradients(runtime, registry, root, *case) for case in norms},
        "tied": tied_embedding(runtime, registry, root),
        "temperature": [divided_logits(runtime, t) for t in (0.7, 1.0)],
        "clock": clock(runtime, registry, root),
        "nothing_valid": nothing_valid(runtime, registry, root),
    }


def samples(order: list[int], valid: bool = True) -> list[TrainSample]:
    """Eight samples of different lengths; the advantage says which, and one failed."""
    batch = sequences(0)
    return [
        TrainSample(batch[i].tokens[: batch[i].prompt].tolist(), batch[i].tokens[batch[i].prompt :].tolist(),
                    (-1.0) ** i * (i + 1), valid=valid and i != 3)
        for i in order
    ]  # fmt: skip


def updates(runtime: Any, registry: GroupRegistry, root: Path, layout: str) -> list[dict[str, Any]]:
    """One update at a learning rate of 0 for every aggregation, micro-batch size and order of samples.

    The gradient of the first of each aggregation is written as a Hugging Face directory; the others are compared with it.
    """
    built = build_engine(runtime, registry, root / "tied", layout, max_grad_norm=0.0)
    gradients = watch_gradients(built)
    facts = []
    for mode in MODES:
        first: dict[str, torch.Tensor] = {}
        for tokens, order in ((1, ORDERS[0]), (24, ORDERS[1]), (4096, ORDERS[1])):
            config = PPOConfig(
                batch_size=8, kl_coef=0.0, entropy_coef=0.01, micro_batch_tokens=tokens, loss_aggregation=mode
            )
            update = PolicyUpdate(built.engine, config, samples(order), [range(8)], TEMPERATURE, runtime.cpu_group)
            update.old_logprobs()
            metrics = update.step(lambda: 0.0)
            if not first:
                first = dict(gradients)
                export_hf(root / "gradients" / f"{layout}-{mode}", built.source, built.arch, built.padded_vocab, first,
                          built.groups, torch.float32)  # fmt: skip
            gap = max(float((gradients[n] - g).abs().max() / g.abs().max().clamp(min=1e-12)) for n, g in first.items())
            facts.append({
                "layout": layout, "mode": mode, "tokens": tokens, "order": order, "gap": worst(gap, runtime),
                "loss": metrics["actor/total_loss"], "norm": metrics["actor/grad_norm"],
                "log_ratio": metrics["actor/log_ratio_max_first"],
                "balanced": metrics["global_seqlen/balanced_max"], "plain": metrics["global_seqlen/max"],
            })  # fmt: skip
    return facts


def watch_gradients(built: Built) -> dict[str, torch.Tensor]:
    """Where the gradient of each parameter will be after a step: this rank's shard, averaged over data parallelism."""
    zero, found = built.engine.zero, {}
    finish = zero.finish_gradients

    def finish_and_look(shared: Any) -> None:
        finish(shared)
        for name, parameter in built.parameters().items():
            gradient = zero.gradient(parameter).detach().clone()
            dist.all_reduce(gradient, group=built.groups.dp)
            found[name] = gradient / built.groups.dp_size

    zero.finish_gradients = finish_and_look  # type: ignore[method-assign]
    return found


def worst(value: float, runtime: Any) -> float:
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=runtime.cpu_group)
    return float(highest)


def train_step(built: Built, step: int) -> Any:
    batch = sequences(step)
    total = sum(int((s.weight != 0).sum()) for s in batch)
    mine = batch[built.groups.dp_rank :: built.groups.dp_size]
    rows = [packed(mine[:1]), packed(mine[1:])]

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: Any) -> tuple[torch.Tensor, dict]:
        return -(logprobs * row.values["weight"].to(logprobs.device)).sum() / total, {}

    return built.engine.train_step(rows, loss, TEMPERATURE)


def skipped(runtime: Any, registry: GroupRegistry, root: Path, layout: str, dtype: str) -> dict[str, Any]:
    """A gradient that is not finite in one tensor of one rank only, then three steps as if nothing had been."""
    built = build_engine(runtime, registry, root / "tied", layout, dtype)
    before = {name: value.clone() for name, value in built.engine.weights.items()}
    hooks = []
    if runtime.rank == runtime.world_size - 1:
        parameter = next(p for name, p in built.parameters().items() if "linear_fc1" in name)
        hooks.append(parameter.register_hook(lambda grad: grad * math.inf))
    result = train_step(built, 0)
    for hook in hooks:
        hook.remove()
    changed = sum(not torch.equal(value, before[name]) for name, value in built.engine.weights.items())
    steps = [train_step(built, step) for step in range(3)]
    name = f"{layout}-{dtype}"
    export_hf(root / "after" / name, built.source, built.arch, built.padded_vocab, built.engine.weights, built.groups,
              torch.float32, flat_shards=built.engine.zero.shards_weights)  # fmt: skip
    return {
        "name": name, "dtype": dtype, "stepped": worst(float(result.stepped), runtime),
        "finite": worst(float(math.isfinite(result.grad_norm)), runtime), "changed": worst(changed, runtime),
        "later": [s.stepped for s in steps], "norms": [s.grad_norm for s in steps],
    }  # fmt: skip


def norm_of_known_gradients(runtime: Any, registry: GroupRegistry, root: Path, layout: str, dtype: str) -> float:
    """Gradient norm where one matrix has a gradient of norm 3 in each of two TP shards, and one norm weight of norm 4."""
    built = build_engine(runtime, registry, root / "untied", layout, dtype)
    known = {"decoder.layers.0.mlp.linear_fc2.weight": 3.0, "decoder.layers.0.input_layernorm.weight": 4.0}
    fix_gradients(built, known)
    return one_row(built).grad_norm


def fix_gradients(built: Built, known: dict[str, float], everywhere: bool = False) -> None:
    """Let every backward pass give zeros, with a known value in the first element (or in all) of some parameters."""
    for name, parameter in built.parameters().items():

        def give(grad: torch.Tensor, value: float = known.get(name, 0.0)) -> torch.Tensor:
            fixed = torch.full_like(grad, value) if everywhere else torch.zeros_like(grad)
            fixed.view(-1)[:1] = value
            return fixed

        parameter.register_hook(give)


def one_row(built: Built) -> Any:
    return built.engine.train_step([packed(sequences(0)[:2])], lambda lp, entropy, row: (lp.sum(), {}), TEMPERATURE)


def tied_embedding(runtime: Any, registry: GroupRegistry, root: Path) -> dict[str, float]:
    """Gradients of the tied embedding of 1 and 2 on the first stage of two replicas, of 4 and 8 on the last."""
    built = build_engine(runtime, registry, root / "tied", "tp1.pp2.zero1", max_grad_norm=0.0)
    name, groups = "embedding.word_embeddings.weight", built.groups
    fix_gradients(built, {name: ((1.0, 2.0), (4.0, 8.0))[groups.pp_rank][groups.dp_rank]}, everywhere=True)
    result = one_row(built)
    weight = built.engine.weights[name]
    return {
        "mean": result.grad_norm / math.sqrt(weight.numel()),
        "apart": worst(float((weight - _from_first(weight, groups)).abs().max()), runtime),
    }  # fmt: skip


def _from_first(weight: torch.Tensor, groups: Any) -> torch.Tensor:
    copy = weight.clone()
    dist.broadcast(copy, src=dist.get_process_group_ranks(groups.embd)[0], group=groups.embd)
    return copy


def divided_logits(runtime: Any, temperature: float) -> float:
    """Log-probability of token 0 under logits [2, 1, 0], one on each of three ranks, padding on the fourth."""
    rows = torch.eye(4, 3)[runtime.rank : runtime.rank + 1]
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found = token_logprobs(logits, rows, torch.tensor([0]), vocab_size=3, temperature=temperature, group=None)
    return float(found[0])


def nothing_valid(runtime: Any, registry: GroupRegistry, root: Path) -> dict[str, float]:
    """An update in which every sample failed."""
    built = build_engine(runtime, registry, root / "tied", "tp2.pp2.zero1")
    before = {name: value.clone() for name, value in built.engine.weights.items()}
    config = PPOConfig(batch_size=8, kl_coef=0.0)
    update = PolicyUpdate(built.engine, config, samples(ORDERS[0], False), [range(8)], TEMPERATURE, runtime.cpu_group)
    metrics = update.old_logprobs() | update.step(lambda: 0.0)
    moved = sum(not torch.equal(value, before[name]) for name, value in built.engine.weights.items())
    return {**metrics, "moved": worst(moved, runtime)}


def clock(runtime: Any, registry: GroupRegistry, root: Path) -> dict[str, Any]:
    """Four mini-batches, the first with a gradient that is not a number on one rank."""
    built = build_engine(runtime, registry, root / "tied", "tp2.pp2.zero1", "bfloat16")
    steps, counts, hooks = [0], [], []
    if runtime.rank == 2:
        hooks.append(next(built.model.parameters()).register_hook(lambda grad: grad * math.nan))

    def lr() -> float:
        counts.append(steps[0])
        return 1e-3

    def stepped() -> None:
        steps[0] += 1

    def begin(index: int, total: int) -> None:
        if index == 1:
            for hook in hooks:
                hook.remove()

    config = PPOConfig(batch_size=8, mini_batch_size=2, kl_coef=0.0)
    mini_batches = [range(i, i + 2) for i in (0, 2, 4, 6)]
    update = PolicyUpdate(built.engine, config, samples(ORDERS[0]), mini_batches, TEMPERATURE, runtime.cpu_group)
    update.old_logprobs()
    metrics = update.step(lr, on_mini_batch=begin, on_step=stepped)
    return {"counts": counts, "skipped": metrics["actor/skipped_steps"]}
