"""Policy updates: a global batch of samples -> optimiser steps, the same for every layout.

Every rank passes the same samples in the same order. Mini-batches, and with them the loss and its normalisation, are
cut from that global order; only then do the data-parallel ranks take shares of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl3d.algorithms.aggregation import sample_weights
from rl3d.algorithms.losses import kl_penalty, policy_loss
from rl3d.config import PPOConfig
from rl3d.data.balancing import pack_shares, seqlen_spread, split_for_dp
from rl3d.data.packing import build_row, scatter_values
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.returns import estimate_advantages
from rl3d.engine.roles import ForwardRole
from rl3d.engine.tally import Tally
from rl3d.engine.training import TrainingEngine
from rl3d.estimate.flops import forward_flops


@dataclass
class TrainSample:
    """One response to learn from.

    Attributes:
        prompt_ids, response_ids: tokens.
        advantage: of every response token, or one for each of them; for algorithms that take it from the sample (grpo).
        rollout_logprobs: what generation reported, [len(response_ids)]; ``None`` when unknown.
        valid: ``False`` leaves the sample out of the loss and its normalisation.
        score: reward of the whole response, for algorithms that work out advantages from it (ppo).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float | Sequence[float] = 0.0
    rollout_logprobs: list[float] | None = None
    valid: bool = True
    score: float | None = None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class PolicyUpdate:
    """One batch of samples on its way through log-probabilities, reference and optimiser steps.

    Args:
        engine: the actor's training engine.
        config: the algorithm.
        samples: the global batch, equal on all ranks.
        mini_batches: indices into ``samples`` of each mini-batch, equal on all ranks.
        temperature: of the rollout; logits are divided by it.
        cpu_group: gloo group over all ranks, for metrics.
    """

    def __init__(self, engine: TrainingEngine, config: PPOConfig, samples: Sequence[TrainSample],
                 mini_batches: Sequence[Sequence[int]], temperature: float, cpu_group: Any):  # fmt: skip
        if config.name == "ppo" and any(s.score is None for s in samples if s.valid):
            raise ValueError("ppo takes advantages from scores, and a sample has none; give TrainSample(score=...)")
        self.engine, self.config, self.temperature = engine, config, temperature
        self.device = next(engine.model.parameters()).device
        self.tally = Tally(engine.groups, cpu_group)
        self._lengths: list[int] = []
        self._shares: list[list[int]] = [[] for _ in range(engine.groups.dp_size)]
        self.mini_batches = [self._rows_of([samples[i] for i in indices]) for indices in mini_batches]
        self._estimated = False

    # ---- building rows

    def _rows_of(self, samples: list[TrainSample]) -> list[MicroBatch]:
        groups, arch, config = self.engine.groups, self.engine.arch, self.config
        counts = torch.tensor([len(s.response_ids) if s.valid else 0 for s in samples])
        weights = sample_weights(counts, config.loss_aggregation)
        shares = split_for_dp([forward_flops(arch, [s.length], len(s.response_ids)) for s in samples], groups.dp_size)
        rounds = groups.pp_size if groups.vpp > 1 else 1
        rows = pack_shares([s.length for s in samples], shares, config.micro_batch_tokens,
                           stages=groups.pp_size, rounds=rounds)[groups.dp_rank]  # fmt: skip
        for whole, mine in zip(self._shares, shares, strict=True):
            whole += [len(self._lengths) + i for i in mine]
        self._lengths += [s.length for s in samples]
        return [_micro_batch(samples, weights, row).to(self.device) for row in rows]

    @property
    def rows(self) -> list[MicroBatch]:
        """This rank's rows of all mini-batches."""
        return [row for rows in self.mini_batches for row in rows]

    # ---- the passes

    def old_logprobs(self) -> dict[str, float]:
        """Log-probabilities under the policy that sampled, by the training engine; kept for the loss.

        Returns:
            metrics: entropy, and how far generation's own log-probabilities are from the training engine's
            (``training/rollout_probs_diff_*`` on probabilities, ``training/rollout_logprobs_diff_max``).
        """
        rows = self.rows
        out = self.engine.logprobs(rows, self.temperature)
        sums: dict[str, float] = {"tokens": 0.0, "entropy": 0.0, "diff": 0.0, "diff2": 0.0}
        top = {"prob_diff": 0.0, "logprob_diff": 0.0}
        for row, (logprobs, entropy) in zip(rows, out):
            row.values["old_logprobs"] = logprobs
            mask = row.values["mask"]
            sums["tokens"] += float(mask.sum())
            sums["entropy"] += float(entropy[mask].sum())
            known = mask & row.values["rollout_logprobs"].isfinite()
            if known.any():
                rollout = row.values["rollout_logprobs"][known]
                diff = (rollout.exp() - logprobs[known].exp()).abs()
                sums["diff"] += float(diff.sum())
                sums["diff2"] += float(diff.double().pow(2).sum())
                top["prob_diff"] = max(top["prob_diff"], float(diff.max()))
                top["logprob_diff"] = max(top["logprob_diff"], float((rollout - logprobs[known]).abs().max()))
        sums, top = self.tally.combine(sums, top)
        n = max(sums["tokens"], 1.0)
        mean = sums["diff"] / n
        return {
            "actor/entropy": sums["entropy"] / n,
            "training/rollout_probs_diff_max": top["prob_diff"],
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_std": max(sums["diff2"] / n - mean**2, 0.0) ** 0.5,
            "training/rollout_logprobs_diff_max": top["logprob_diff"],
        }

    def reference_logprobs(self, reference: ForwardRole) -> dict[str, float]:
        """The reference model's log-probabilities, kept for the KL penalty. Returns the KL before the update."""
        rows = self.rows
        out = reference.logprobs(rows, self.temperature)
        sums = {"tokens": 0.0, "kl": 0.0}
        for row, logprobs in zip(rows, out):
            values = row.values
            values["ref_logprobs"] = logprobs
            sums["tokens"] += float(values["mask"].sum())
            sums["kl"] += float(kl_penalty(values["old_logprobs"], logprobs, values["mask"], "k1").sum())
        sums, _ = self.tally.combine(sums)
        return {"actor/reward_kl_penalty": sums["kl"] / max(sums["tokens"], 1.0)}

    def advantages(self) -> dict[str, float]:
        """Advantages and returns of every token, from what the rows hold by now; see :func:`estimate_advantages`.

        To be called after the log-probabilities, the reference and the critic's values; :meth:`step` does it otherwise.
        """
        self._estimated = True
        return estimate_advantages(self.rows, self.config, self.tally)

    def step(self, lr_of_step: Callable[[], float], on_mini_batch: Callable[[int, int], None] | None = None,
             on_step: Callable[[], None] | None = None) -> dict[str, float]:  # fmt: skip
        """All optimiser steps: ``ppo_epochs`` passes over the mini-batches.

        Args:
            lr_of_step: learning rate of the next optimiser step.
            on_mini_batch: called before each with (index, total).
            on_step: called after each optimiser step that was taken.

        Returns:
            metrics under verl's names, means over mini-batches.
        """
        if not self._estimated:
            self.advantages()
        total = self.config.ppo_epochs * len(self.mini_batches)
        history: list[dict[str, float]] = []
        for index in range(total):
            rows = self.mini_batches[index % len(self.mini_batches)]
            if on_mini_batch is not None:
                on_mini_batch(index, total)
            lr = lr_of_step()
            self.engine.zero.set_lr(lr)
            result = self.engine.train_step(rows, self._loss, self.temperature, last=index == total - 1)
            if result.stepped and on_step is not None:
                on_step()
            history.append(self._metrics(result.collected, result.grad_norm, result.stepped, lr))
        out = {key: sum(h[key] for h in history) / len(history) for key in history[0]}
        out |= seqlen_spread(self._lengths, self._shares)
        out["actor/lr"] = history[-1]["actor/lr"]
        out["actor/skipped_steps"] = sum(h["actor/skipped_steps"] for h in history)
        out["actor/log_ratio_max_first"] = history[0]["actor/log_ratio_max_first"]
        return out

    def _loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        config, values = self.config, batch.values
        mask, weights = values["mask"], values["weights"]
        old = values.get("old_logprobs", logprobs.detach())
        advantages = values["advantages"]
        surrogate = policy_loss(logprobs, old, advantages, mask, clip_low=config.clip_low, clip_high=config.clip_high)
        pg_loss = (weights * surrogate.per_token).sum()
        loss = pg_loss
        collected = {f"sum/{k}": v for k, v in surrogate.sums.items()}
        inside = torch.where(mask, entropy, 0.0)
        collected["sum/entropy"] = inside.detach().sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (weights * inside).sum()
        if config.kl_in == "loss" and config.kl_coef > 0 and "ref_logprobs" in values:
            penalty = kl_penalty(logprobs, values["ref_logprobs"], mask, config.kl_estimator)
            kl_loss = (weights * penalty).sum()
            loss = loss + config.kl_coef * kl_loss
            collected["loss/kl"] = kl_loss.detach()
        collected["loss/pg"], collected["loss/total"] = pg_loss.detach(), loss.detach()
        gap = torch.where(mask, logprobs.detach() - old, 0.0).abs()
        collected["max/log_ratio"] = gap.max() if gap.numel() else gap.sum()
        return loss, collected

    # ---- metrics

    def _metrics(self, collected: list[dict[str, Any]], grad_norm: float, stepped: bool, lr: float) -> dict[str, float]:
        sums = dict.fromkeys(("tokens", "clipfrac", "ppo_kl", "entropy", "pg", "kl", "total"), 0.0)
        top = {"log_ratio": 0.0}
        for c in collected:
            for name in ("tokens", "clipfrac", "ppo_kl", "entropy"):
                sums[name] += float(c[f"sum/{name}"])
            for name in ("pg", "kl", "total"):
                sums[name] += float(c.get(f"loss/{name}", 0.0))
            top["log_ratio"] = max(top["log_ratio"], float(c["max/log_ratio"]))
        sums, top = self.tally.combine(sums, top)
        n = max(sums["tokens"], 1.0)
        return {
            "actor/pg_loss": sums["pg"],
            "actor/kl_loss": sums["kl"],
            "actor/total_loss": sums["total"],
            "actor/ppo_kl": sums["ppo_kl"] / n,
            "actor/pg_clipfrac": sums["clipfrac"] / n,
            "actor/grad_norm": grad_norm,
            "actor/lr": lr,
            "actor/skipped_steps": float(not stepped),
            "actor/log_ratio_max_first": top["log_ratio"],
        }


def _micro_batch(samples: Sequence[TrainSample], weights: Tensor, indices: Sequence[int]) -> MicroBatch:
    """The samples at ``indices`` as one row. No indices give a row from which nothing is learnt."""
    row = build_row(samples, indices)
    select = row.mask.nonzero()[:, 0]
    sample = row.sample_of[select]
    per_sample = {
        "weights": weights.float(),
        "mask": torch.tensor([s.valid for s in samples], dtype=torch.bool),
    }
    values = {name: value[sample] for name, value in per_sample.items()}
    mine = {i: samples[i] for i in indices}
    sizes = {i: len(s.response_ids) for i, s in mine.items()}
    per_token: dict[str, dict[int, Sequence[float]]] = {
        "rollout_logprobs": {i: s.rollout_logprobs or [float("nan")] * sizes[i] for i, s in mine.items()},
        "advantages": {i: _for_each(s.advantage, sizes[i]) for i, s in mine.items()},
        "scores": {i: [0.0] * (n - 1) + [mine[i].score or 0.0] * (n > 0) for i, n in sizes.items()},  # on the last token
    }
    for name, value in per_token.items():
        values[name] = scatter_values(row, value)[select]
    lengths = tuple(row.cu_seqlens.diff().tolist())
    return MicroBatch(row.tokens, row.positions, lengths, select, row.labels[select], values, tuple(sizes.values()))


def _for_each(value: float | Sequence[float], count: int) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value] * count
