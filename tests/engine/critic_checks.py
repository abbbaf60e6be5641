"""Checks of the critic on four ranks; facts go back to test_critic.py, which asserts on them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine.critic import Critic
from rl3d.engine.policy import TrainSample
from rl3d.engine.reward_model import RewardModel
from tests.reference import sequences

SETTINGS: dict[str, Any] = {
    "name": "ppo", "kl_coef": 0.0, "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 2, "micro_batch_tokens": 24,
    "critic_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01, "max_grad_norm": 0.5, "value_clip": 0.1,
    "gamma": 0.97, "lam": 0.9, "vf_coef": 0.5,
}  # fmt: skip
TEMPERATURE = 0.7


def samples() -> list[TrainSample]:
    """Eight ragged responses with a score each, one of them failed; the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    scores = (2 * torch.randn(8, generator=generator)).tolist()
    return [
        TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), valid=i != 3, score=scores[i])
        for i, s in enumerate(sequences(0))
    ]


def main(runtime: Any, directory: str, layouts: list[str]) -> dict[str, Any]:
    root = Path(directory)
    facts: dict[str, Any] = {"trained": [_train(root, layout, "device") for layout in layouts]}
    kinds = ((layouts[0], "float32", "host"), ("tp2.pp1.zero3", "float32", "host"),
             (layouts[0], "bfloat16", "device"), (layouts[0], "bfloat16", "host"))  # fmt: skip
    facts["waiting"] = [_train(root, layout, where, dtype) for layout, dtype, where in kinds]
    facts["fresh"] = _fresh(root, layouts[0])
    facts["frozen"] = [_frozen(root, layout, where) for layout, where in zip(layouts[:2], ("host", "device"), strict=True)]
    facts["frozen"].append(_frozen(root, "tp2.pp1.zero3", "device"))
    facts["penalised"] = [_penalised(root, layout) for layout in layouts[:2]]
    facts["errors"] = _errors(root)
    facts["scores"] = _scores(root, layouts[0])
    return facts


def _train(root: Path, layout: str, where: str, dtype: str = "float32") -> dict[str, Any]:
    """Values, advantages, and four optimiser steps of a critic whose weights come from a sequence classifier."""
    config = PPOConfig(**SETTINGS, critic_model=str(root / "classifier"), critic_residency=where)
    train, _, sequence_parallel = layout.partition("+")
    actor = Actor(root / "untied", train=train, algorithm=config, dtype=dtype, sequence_parallel=bool(sequence_parallel))
    critic = Critic(actor)
    update = actor.policy_update(samples(), [range(4), range(4, 8)], 1.0)
    update.old_logprobs()
    critic.values(update)
    metrics = update.advantages()
    away = [critic.residency.away, sum(t.untyped_storage().nbytes() for t in critic.engine.zero.resident_tensors())]
    rates = iter([1e-3, 8e-4, 6e-4, 4e-4])
    steps: list[dict[str, float]] = []
    original = critic.engine.train_step

    def recorded(batches: Any, loss: Any) -> Any:
        result = original(batches, loss)
        total, _ = update.tally.combine({"loss": sum(float(c["loss"]) for c in result.collected)})
        steps.append({"loss": total["loss"], "norm": result.grad_norm, "rows": len(batches)})
        return result

    critic.engine.train_step = recorded
    metrics |= critic.update(update, lambda: next(rates))
    name = f"{layout}-{where}-{dtype}"
    critic.save_hf(root / "out" / name, torch.float32)
    return {"name": name, "layout": layout, "where": where, "dtype": dtype, "metrics": metrics, "steps": steps, "away": away}


def _fresh(root: Path, layout: str) -> dict[str, Any]:
    """A tied policy under pipeline stages: its critic has no head over the vocabulary and no second embedding."""
    config = PPOConfig(**SETTINGS)
    actor = Actor(root / "tied", train=layout, algorithm=config)
    critic = Critic(actor)
    held = {name: list(value.shape) for name, value in critic.weights.items() if "decoder.layers" not in name}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [critic.groups.pp_rank, held])
    update = actor.policy_update(samples(), [range(8)], 1.0)
    critic.values(update)
    values = [float(row.values["values"].abs().max()) for row in update.rows if "values" in row.values]
    update.old_logprobs()
    update.advantages()
    metrics = critic.update(update, lambda: 1e-3)
    critic.save_hf(root / "out" / "fresh")
    return {"held": everyone, "values": values, "grad_norm": metrics["critic/grad_norm"]}


def _frozen(root: Path, layout: str, where: str) -> dict[str, Any]:
    """A frozen critic: values as transformers has them, weights away between uses, nothing to train."""
    config = PPOConfig(**SETTINGS, critic_model=str(root / "tokens"), critic_residency=where, freeze_critic=True)
    actor = Actor(root / "untied", train=layout, algorithm=config)
    critic = Critic(actor)
    update = actor.policy_update(samples(), [range(8)], 1.0)
    away, found = [critic.residency.away], []
    for _ in range(2):
        critic.values(update)
        away.append(critic.residency.away)
        found.append([row.values["values"].clone() for row in update.rows if "values" in row.values])
    update.old_logprobs()
    metrics = update.advantages()
    return {
        "layout": layout, "where": where, "away": away, "metrics": metrics, "frozen": critic.frozen,
        "again": all(torch.equal(a, b) for a, b in zip(*found, strict=True)),
        "trainable": sum(p.requires_grad for p in critic._role.model.parameters()),
        "update": _error(lambda: critic.update(update, lambda: 0.0)),
    }  # fmt: skip


def _penalised(root: Path, layout: str) -> dict[str, float]:
    """No critic: scores less the KL to a reference that is another model, and waits on the host."""
    config = PPOConfig(**{**SETTINGS, "use_critic": False, "kl_coef": 0.3}, reference_model=str(root / "reference"))
    actor = Actor(root / "untied", train=layout, algorithm=config, reference_residency="host")
    update = actor.policy_update(samples(), [range(4), range(4, 8)], TEMPERATURE)
    update.old_logprobs()
    assert actor.parts.reference is not None and actor.parts.reference.residency.away
    return update.reference_logprobs(actor.parts.reference) | update.advantages()


def _scores(root: Path, layout: str) -> list[float]:
    """Scores of a reward model that waits on the host; one sequence fills a row by itself."""
    actor = Actor(root / "untied", train=layout, algorithm=PPOConfig(kl_coef=0.0))
    model = RewardModel(actor, root / "classifier", residency="host", micro_batch_tokens=24)
    first = model.scores([s.prompt_ids + s.response_ids for s in samples()])
    assert model.role.residency.away and model.scores([]) == []
    return first


def _errors(root: Path) -> list[str]:
    actor = Actor(root / "untied", algorithm=PPOConfig(name="ppo"))
    errors = [_error(lambda m=m: Critic(actor, PPOConfig(name="ppo", critic_model=str(root / m)))) for m in ("two", "other")]
    return [*errors, _error(lambda: RewardModel(actor, root / "untied"))]


def _error(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"
