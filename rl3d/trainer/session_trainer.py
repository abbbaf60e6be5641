"""``RLTrainer`` on the actor of a session: the steps run on its ranks, rewards and callbacks here."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rl3d.config import PPOConfig, RolloutConfig, TrainerConfig
from rl3d.distributed.bootstrap import current
from rl3d.engine.session_actor import SessionActor, actor_of

_HERE = "rl3d.trainer.session_trainer"
_numbers = itertools.count()


class SessionTrainer:
    """What :class:`rl3d.RLTrainer` returns for a :class:`~rl3d.engine.session_actor.SessionActor`.

    Rows of the dataset are copied to the ranks. Reward functions and callbacks, lambdas too, stay in this process and are
    called from threads of it, rewards while sampling goes on.

    Raises:
        TypeError: a reward that is neither a function nor can be sent to the ranks.
    """

    def __init__(self, actor_model: SessionActor, tokenizer: Any = None, dataset: Any = None,
                 config: PPOConfig | None = None, reward_fn: Any = None, *, rollout: RolloutConfig | None = None,
                 trainer: TrainerConfig | None = None) -> None:  # fmt: skip
        if dataset is None or reward_fn is None:
            raise ValueError("RLTrainer needs a dataset and a reward_fn; pass both")
        self.actor = actor_model
        self._number = next(_numbers)
        self._ranks(
            "make", actor_model._number, tokenizer, list(dataset), config, self._rewards(reward_fn), rollout, trainer
        )

    def add_callback(self, callback: Callable[[int, dict[str, Any]], None]) -> None:
        """Call ``callback(step, logs)`` here after each step."""
        self._ranks("invoke", "add_callback", self.actor.session.lend(callback))

    def train(self, num_train_epochs: int | None = None) -> dict[str, Any]:
        """As :meth:`rl3d.RLTrainer.train`."""
        return self._ranks("invoke", "train", num_train_epochs)

    def train_for(self, steps: int) -> dict[str, Any]:
        """As :meth:`rl3d.RLTrainer.train_for`."""
        return self._ranks("invoke", "train_for", steps)

    def step(self) -> dict[str, Any]:
        """One step: sample, score, update; its metrics."""
        return self._ranks("invoke", "step")

    def save(self) -> Path:
        """Write a checkpoint of the run now; where."""
        return self._ranks("invoke", "save")

    @property
    def global_step(self) -> int:
        """Steps done."""
        return self._ranks("attribute", "global_step")

    def _ranks(self, function: str, *args: Any) -> Any:
        return self.actor.session.call(f"{_HERE}:{function}", self._number, *args)[0]

    def _rewards(self, reward: Any) -> Any:
        if isinstance(reward, Sequence) and not isinstance(reward, str):
            pairs = [(entry if isinstance(entry, tuple) else (entry, 1.0)) for entry in reward]
            return [(self._rewards(fn), weight) for fn, weight in pairs]
        if isinstance(reward, str) or isinstance(reward, nn.Module) or hasattr(reward, "at_boundary"):
            return reward
        return self.actor.session.lend(reward)


# ---- on the ranks

_trainers: dict[int, Any] = {}


def make(number: int, actor: int, tokenizer: Any, rows: list[Any], config: Any, reward: Any, rollout: Any,
         trainer: Any) -> None:  # fmt: skip
    """On a rank: build the trainer."""
    from rl3d.trainer.trainer import RLTrainer

    _trainers[number] = RLTrainer(actor_of(actor), tokenizer, rows, config, reward, rollout=rollout, trainer=trainer)


def invoke(number: int, method: str, *args: Any) -> Any:
    """On a rank: call a method; its result on rank 0."""
    result = getattr(_trainers[number], method)(*args)
    runtime = current()
    return result if runtime is None or runtime.rank == 0 else None


def attribute(number: int, name: str) -> Any:
    """On a rank: the value of an attribute."""
    return getattr(_trainers[number], name)
