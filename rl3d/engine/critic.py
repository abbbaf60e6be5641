"""The critic: a value model in the actor's training layout, with an optimiser of its own or frozen."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl3d.algorithms.losses import value_loss
from rl3d.config import PPOConfig
from rl3d.engine.actor import Actor
from rl3d.engine.assemble import load_value_model
from rl3d.engine.download import local_directory
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.policy import PolicyUpdate
from rl3d.engine.residency import Residency
from rl3d.engine.roles import ForwardRole
from rl3d.engine.training import TrainingEngine
from rl3d.engine.zero import AdamSettings
from rl3d.io.export_hf import export_hf


class Critic:
    """Values of response tokens, and their learning, on the rows of a :class:`PolicyUpdate`.

    The backbone is the actor's own initial one unless ``config.critic_model`` names another: a language model (the head
    is then new), or a sequence or token classifier with one label. A new head gives 0 everywhere. Never tied: no stage
    but the first holds the embedding.

    Args:
        actor: whose layout, groups and dtype the critic shares. Collective over all ranks.
        config: the algorithm; by default the actor's.

    Raises:
        UnsupportedModelError: a classifier with several labels, a model that the layout cannot cut, another vocabulary.
        CheckpointError: the weights do not match the configuration.
    """

    def __init__(self, actor: Actor, config: PPOConfig | None = None):
        self.config = config = actor.algorithm if config is None else config
        parts, settings = actor.parts, actor.settings
        self.groups, self._runtime = parts.groups, actor.runtime
        self.source = actor.source.directory
        if config.critic_model is not None:
            self.source = local_directory(config.critic_model, actor.runtime)
        model, self.arch, self.padded_vocab = load_value_model(self.source, parts)
        self.engine: TrainingEngine | None = None
        self._role: ForwardRole | None = None
        if config.freeze_critic:
            self._role = ForwardRole(model, self.arch, self.groups, residency=config.critic_residency,
                                     sharded=settings.train.zero == 3)  # fmt: skip
            self.residency = self._role.residency
        else:
            adam = AdamSettings(config.critic_lr, config.betas, config.eps, config.weight_decay, config.max_grad_norm)
            self.engine = engine = TrainingEngine(
                model, self.arch, self.groups, stage=settings.train.zero, settings=adam, deepspeed=settings.deepspeed,
                offload=settings.offload,
            )  # fmt: skip
            zero = engine.zero
            self.residency = Residency(zero.resident_tensors, config.critic_residency, changed=lambda: zero.changes)

    @property
    def frozen(self) -> bool:
        return self.engine is None

    # ---- the two passes

    def values(self, update: PolicyUpdate) -> dict[str, float]:
        """Values of all rows of ``update``, kept there for the advantages and the value loss. Collective."""
        with self.residency.resident():
            forward = self._role or self.engine
            assert forward is not None
            for row, values in zip(update.rows, forward.values(update.rows)):
                row.values["values"] = values
        return {}

    def update(self, update: PolicyUpdate, lr_of_step: Callable[[], float],
               on_mini_batch: Callable[[int, int], None] | None = None,
               on_step: Callable[[], None] | None = None) -> dict[str, float]:  # fmt: skip
        """All optimiser steps of the critic, on the rows and mini-batches of the actor. Collective.

        The loss is half the squared error to the returns, clipped around the old values (verl's
        ``compute_value_loss``), times ``vf_coef``. ``update`` must have values and returns
        (:meth:`values`, :meth:`PolicyUpdate.advantages`).

        Returns:
            metrics under verl's names, means over mini-batches; ``critic/vf_loss`` is without ``vf_coef``.

        Raises:
            ValueError: a frozen critic.
        """
        if self.engine is None:
            raise ValueError("a frozen critic does not learn; set freeze_critic=False")
        total = self.config.ppo_epochs * len(update.mini_batches)
        history: list[dict[str, float]] = []
        with self.residency.resident():
            for index in range(total):
                if on_mini_batch is not None:
                    on_mini_batch(index, total)
                lr = lr_of_step()
                self.engine.zero.set_lr(lr)
                result = self.engine.train_step(update.mini_batches[index % len(update.mini_batches)], self._loss)
                if result.stepped and on_step is not None:
                    on_step()
                history.append(_metrics(result.collected, update))
                history[-1] |= {"critic/grad_norm": result.grad_norm, "critic/lr": lr,
                                "critic/skipped_steps": float(not result.stepped)}  # fmt: skip
        out = {key: sum(h[key] for h in history) / len(history) for key in history[0]}
        out["critic/lr"] = history[-1]["critic/lr"]
        out["critic/skipped_steps"] = sum(h["critic/skipped_steps"] for h in history)
        return out

    def _loss(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        mask, weights = batch.values["mask"], batch.values["weights"]
        loss = value_loss(values, batch.values["values"], batch.values["returns"], mask, clip=self.config.value_clip)
        total = (weights * loss.per_token).sum()
        return self.config.vf_coef * total, {"loss": total.detach(), **loss.sums}

    # ---- saving

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a sequence classifier with one label (a token classifier when the head has a bias) that
        ``transformers`` loads, tokenizer included. Collective."""
        with self.residency.resident():
            sharded = self.engine is not None and self.engine.zero.shards_weights
            export_hf(directory, self.source, self.arch, self.padded_vocab, self.weights, self.groups, dtype,
                      flat_shards=sharded)  # fmt: skip
            self._runtime.barrier()

    @property
    def weights(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's shard (ZeRO 3: its flat part); to be read inside ``residency.resident()``."""
        owner = self.engine or self._role
        assert owner is not None
        return owner.weights


def _metrics(collected: Sequence[dict[str, Any]], update: PolicyUpdate) -> dict[str, float]:
    names = ("loss", "tokens", "vf_clipfrac", "value")
    sums, _ = update.tally.combine({name: sum(float(c[name]) for c in collected) for name in names})
    n = max(sums["tokens"], 1.0)
    return {
        "critic/vf_loss": sums["loss"],
        "critic/vf_clipfrac": sums["vf_clipfrac"] / n,
        "critic/vpred_mean": sums["value"] / n,
    }
