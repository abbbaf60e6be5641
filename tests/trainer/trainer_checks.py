"""Whole training runs on two ranks; facts go back to test_trainer.py."""

import json
import os
import queue
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig, RLTrainer
from rl3d.config import RolloutConfig, TrainerConfig
from rl3d.data.dataset import PromptDataset
from rl3d.data.sources import load_rows
from rl3d.data.tokenizers import load_tokenizer
from rl3d.distributed import notice
from rl3d.engine.reward_model import RewardModel
from rl3d.rewards.runner import RewardFailure
from rl3d.trainer.checkpoint import ResumeError
from rl3d.trainer.exchange import ExchangeError
from rl3d.trainer.flows import Flows, rewarding_flow, sampling_flow

N = 4


def score(prompt: str, response: str, answer: str) -> float:
    return response.replace(" ", "").count(answer) / 8


def make(root: Path, run: str, steps: int, /, *, tied: bool = True, reward: Any = score, flows: Flows | None = None,
         resume: str = "auto", **algorithm: Any) -> RLTrainer:  # fmt: skip
    """A trainer of its own on the tiny task; TP1·PP2 trains, two replicas generate."""
    config = PPOConfig(**{"batch_size": 6, "mini_batch_size": 3, "ppo_epochs": 2, "lr": 3e-3, "kl_coef": 0.05, "eps": 1e-5,
                          "micro_batch_tokens": 96, "lr_schedule": "cosine", "warmup_steps": 2, **algorithm})  # fmt: skip
    model = root / "model"
    actor = Actor(model, train="tp1.pp2.zero1", gen="tp1", algorithm=config, reference=True, max_sequence_length=32)
    tokenizer = load_tokenizer(model)
    data = PromptDataset(load_rows("tiny:copy", size=20, seed=1), tokenizer)
    settings = TrainerConfig(name=run, output_dir=str(root / "runs"), steps=steps, save_every=3, resume=resume, seed=5)
    rollout = RolloutConfig(n=N, max_new_tokens=6)
    return RLTrainer(actor, tokenizer, data, config, reward, rollout=rollout, trainer=settings, flows=flows)


def main(runtime: Any, directory: str) -> dict[str, Any]:
    root = Path(directory)
    seen: list[tuple[int, float]] = []
    whole = make(root, "whole", 6)
    whole.add_callback(lambda step, logs: seen.append((step, logs["reward_mean"])))
    last = whole.train()
    straight = whole.actor.hybrid.training_fingerprints()

    first = make(root, "halves", 6, resume="never")
    first.add_callback(lambda step, logs: _warn(runtime) if step == 2 else None, every_rank=True)
    first.train()
    stopped = [first.stopped, first.global_step, (first.run_dir / "hf").exists()]
    early = make(root, "early", 2)
    notice.remember()
    _warn(runtime)  # while the run starts
    early.train()
    stopped += [early.stopped, early.global_step]
    second = make(root, "halves", 6)
    second.train()
    resumed = second.actor.hybrid.training_fingerprints()
    again = make(root, "halves", 6).train()

    facts = {
        "callbacks": seen,
        "last": last,
        "equal": straight == resumed,
        "stopped": stopped,
        "again": again,
    }
    facts |= _own_flows(root) | _failures(root) | {"ppo": _ppo(root)}
    facts["old_run"] = second.optimizer_steps
    return facts


def _warn(runtime: Any) -> None:
    """What a scheduler does before it ends a job; here one rank alone hears of it."""
    if runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)


def _ppo(root: Path) -> dict[str, Any]:
    """PPO with a critic, straight and resumed; then with the learned critic frozen, and with none."""
    settings = {"name": "ppo", "critic_lr": 3e-3, "critic_warmup_steps": 6, "critic_only_steps": 1, "lam": 0.9,
                "critic_residency": "host"}  # fmt: skip
    whole = make(root, "ppo", 6, **settings)
    whole.train()
    make(root, "ppo-halves", 6, resume="never", **settings).train_for(3)
    halves = make(root, "ppo-halves", 6, **settings)
    halves.train()
    learned = str(whole.run_dir / "critic")
    frozen = make(root, "ppo-frozen", 2, name="ppo", critic_model=learned, freeze_critic=True)
    frozen.train()
    none = make(root, "ppo-none", 2, name="ppo", use_critic=False, kl_coef=0.05)
    none.train()
    scored = make(root, "ppo-scored", 1, name="ppo", use_critic=False, reward=lambda response: 1.0)
    scored.reward_model = RewardModel(scored.actor, learned, micro_batch_tokens=48), 0.5
    scored.settings.samples_per_step = 24
    mean = scored.train()["reward_mean"]
    with whole.critic.residency.resident(), halves.critic.residency.resident(), frozen.critic.residency.resident():
        critics = [trainer.critic.weights for trainer in (whole, halves, frozen)]
        same = [all(torch.equal(critics[0][name], other[name]) for name in critics[0]) for other in critics[1:]]
    return {
        "policy": whole.actor.hybrid.training_fingerprints() == halves.actor.hybrid.training_fingerprints(),
        "critic": same[0], "frozen": same[1], "steps": [whole.optimizer_steps, whole.critic_steps, frozen.critic_steps],
        "scored": mean, "none": none.critic is None, "mixed": _error(lambda: make(root, "ppo-halves", 7).train()),
    }  # fmt: skip


def _own_flows(root: Path) -> dict[str, Any]:
    """Two rewarding flows share the work; a sampling flow that drops a response is caught on every rank."""
    uids: list[str] = []

    def counting(ctx: Any, inbox: Any, out: Any) -> None:
        mine: queue.Queue = queue.Queue()
        rewarding_flow(ctx, inbox, mine)
        while not mine.empty():
            sample = mine.get()
            uids.append(sample.uid)
            out.put(sample)

    trainer = make(root, "doubled", 1, flows=Flows(rewarding=[counting, counting]))
    trainer.train()
    scored: list[Any] = [None, None]
    dist.all_gather_object(scored, uids)

    def lossy(ctx: Any, out: Any) -> None:
        inner: queue.Queue = queue.Queue()
        sampling_flow(ctx, inner)
        kept = list(inner.queue)[1:]
        for sample in kept:
            out.put(sample)

    return {"scored": sum(map(len, scored)), "distinct": len({u for part in scored for u in part}),
            "lossy": _error(lambda: make(root, "lossy", 1, flows=Flows(sampling=lossy)).train())}  # fmt: skip


def _failures(root: Path) -> dict[str, Any]:
    """A reward that fails for some prompts costs those samples only; one that always fails ends the run everywhere."""

    def sometimes(prompt: str, response: str, answer: str) -> float:
        if answer in "ab":
            raise RuntimeError("no answer key")
        return float(len(response))

    def never(prompt: str, response: str) -> float:
        raise RuntimeError("service is down")

    trainer = make(root, "sometimes", 1, reward=sometimes)
    trainer.rewards.max_failure_rate = 1.0
    logs = trainer.train()
    broken = _error(lambda: make(root, "never", 1, reward=never).train())
    return {"failed": logs["reward/failed"], "finite": logs["actor/grad_norm"], "broken": broken}


def _error(call: Any) -> str:
    try:
        call()
    except (ExchangeError, RewardFailure, ResumeError) as error:
        return str(error)
    return "no error"


def metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def script(runtime: Any, directory: str) -> dict[str, Any]:
    """What a script does with one rank: a model object, rows of its own, no configuration file."""
    from transformers import AutoModelForCausalLM

    root = Path(directory)
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    tokenizer = load_tokenizer(root / "model")
    plain = Actor(model, tokenizer)
    out = plain.rollout(tokenizer(["a :", "b :"], return_tensors="pt")["input_ids"], max_new_tokens=4, temperature=0.0)
    errors = []
    for config in (PPOConfig(kl_coef=0.1), PPOConfig(kl_coef=0, eps=1e-3)):
        try:
            RLTrainer(plain, tokenizer, [{"prompt": "a :", "answer": "a"}], config, score)
        except ValueError as error:
            errors.append(str(error))
    sharded = PPOConfig(fsdp_config={"sharding_strategy": "FULL_SHARD"}, kl_coef=0.0)
    choices: list[dict[str, Any]] = [{"algorithm": sharded}, {"train": "tp1.pp1.zero2"}]
    stages = [Actor(root / "model", **choice).settings.train.zero for choice in choices]
    rows = [{"prompt": f"{letter} :", "answer": letter} for letter in "abcdabcd"]
    config = PPOConfig(batch_size=4, mini_batch_size=2, lr=1e-3)
    trainer = RLTrainer(
        root / "model", None, rows, config, [score, (lambda prompt, response: 1.0, 0.5)],
        rollout=RolloutConfig(n=2, max_new_tokens=4), trainer=TrainerConfig(output_dir=str(root / "scripted"), steps=1),
    )  # fmt: skip
    logs = trainer.train(num_train_epochs=1)
    return {
        "greedy": out.sequences.tolist(), "errors": errors, "stages": stages, "steps": trainer.global_step,
        "reward": logs["reward_mean"], "reference": trainer.actor.parts.reference is not None,
        "length": plain.settings.max_sequence_length,
    }  # fmt: skip
