"""``Actor(..., num_gpus=N)``: the actor of a session, whose ranks are processes of their own.

What a method returns is rank 0's; tensors arrive on the CPU.
"""

import dataclasses
import functools
import inspect
import itertools
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rl3d.distributed.bootstrap import current
from rl3d.distributed.session import Session

METHODS = ("generate", "rollout", "update", "switch_to_generation", "switch_to_training", "set_tokenizer", "save_hf")
_HERE = "rl3d.engine.session_actor"
_numbers = itertools.count()


class SessionActor:
    """An actor whose ranks this process has started, with :class:`rl3d.Actor`'s methods.

    Attributes:
        session: the ranks; ``session.call("package.module:function", ...)`` runs a function of yours on each.
        tokenizer: the model's.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, num_gpus: int, device: str = "auto", timeout_s: float = 600,
                 **options: Any) -> None:  # fmt: skip
        if type(num_gpus) is not int or num_gpus < 1:
            raise ValueError(f"num_gpus = {num_gpus!r}: expected the number of ranks to start, 1 or more")
        if not isinstance(options.get("engine") or "", str):
            raise ValueError(
                f"engine is a {type(options['engine']).__name__} of this process, and num_gpus = {num_gpus} starts ranks in "
                f"others, which cannot have it; leave num_gpus out, or let engine='vllm' start one in each rank"
            )
        self.session = Session(num_gpus, device=device, timeout_s=timeout_s)
        try:
            with tempfile.TemporaryDirectory(prefix="rl3d-model-") as scratch:
                if hasattr(model, "save_pretrained"):
                    model = _hand_over(model, Path(scratch))
                self._number = next(_numbers)
                options |= {"device": device, "timeout_s": timeout_s}
                self.tokenizer = self._ranks("make", model, tokenizer, options)
        except BaseException:
            self.session.close()
            raise
        self._forget = weakref.finalize(self, self.session.close)

    def _ranks(self, function: str, *args: Any, **kwargs: Any) -> Any:
        return self.session.call(f"{_HERE}:{function}", self._number, *args, **kwargs)[0]

    @property
    def is_generation_mode(self) -> bool:
        return self._ranks("attribute", "is_generation_mode")

    @property
    def is_training_mode(self) -> bool:
        return self._ranks("attribute", "is_training_mode")

    def close(self) -> None:
        """End the ranks."""
        self.session.close()

    def __enter__(self) -> "SessionActor":
        return self

    def __exit__(self, *ignored: Any) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        from rl3d.engine.actor import Actor

        method = getattr(Actor, name, None) if name in METHODS else None
        if method is None:
            raise AttributeError(
                f"the actor of a session has no {name!r}; it has {', '.join(m for m in METHODS if hasattr(Actor, m))}, and "
                f"session.call() runs functions of yours on its ranks"
            )

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._ranks("invoke", name, _on_cpu(args), _on_cpu(kwargs))

        found = inspect.signature(method)
        call.__signature__ = found.replace(parameters=list(found.parameters.values())[1:])  # type: ignore[attr-defined]
        return call

    def __dir__(self) -> list[str]:
        from rl3d.engine.actor import Actor

        return sorted({*super().__dir__(), *(name for name in METHODS if hasattr(Actor, name))})


def _hand_over(model: Any, directory: Path) -> str:
    """Write a model object where all ranks read their parts of it, and release its weights here."""
    model.save_pretrained(directory)
    model.to("meta")
    return str(directory)


def _on_cpu(value: Any) -> Any:
    """The same, with every tensor in it detached and on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_on_cpu(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _on_cpu(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


# ---- on the ranks

_actors: dict[int, Any] = {}


def actor_of(number: int) -> Any:
    """On a rank: the actor that the session knows by this number."""
    return _actors[number]


def make(number: int, model: Any, tokenizer: Any, options: dict[str, Any]) -> Any:
    """On a rank: build the actor; its tokenizer."""
    from rl3d.engine.actor import Actor

    _actors[number] = Actor(model, tokenizer, **options)
    return _actors[number].tokenizer if _first() else None


def invoke(number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a rank: call a method; its result on rank 0."""
    result = getattr(_actors[number], method)(*args, **kwargs)
    return _on_cpu(result) if _first() else None


def attribute(number: int, name: str) -> Any:
    """On a rank: the value of an attribute."""
    return getattr(_actors[number], name)


def _first() -> bool:
    runtime = current()
    return runtime is None or runtime.rank == 0
