"""What scores a response: any Python function, found by its import path and called with what it asks for."""

import importlib
import importlib.util
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl3d.data.batch import Prompt, Sample


class RewardError(ValueError):
    """A reward that cannot be found or called, or that returned something that is no score."""


class RewardFunction:
    """A Python function as a reward.

    ``fn(prompt, response)`` gets the prompt's and the response's text (of a conversation, the last user message).
    Parameters with these names, or with the name of a column, get those instead, in any order: ``answer``,
    ``data_source``, ``messages``, ``prompt_ids``, ``response_ids``, ``finish_reason`` and every other column of the row;
    ``**kwargs`` takes all. Two leading parameters with other names are taken for prompt and response. ``kwargs`` are
    passed with every call and win over columns.

    The result must be a finite number (or something that ``float`` takes, such as a 0-d tensor).
    """

    def __init__(self, fn: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, name: str | None = None):
        if not callable(fn):
            raise RewardError(f"reward {name or fn!r} is a {type(fn).__name__}; expected a function")
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.kwargs = dict(kwargs or {})
        try:
            self._parameters: tuple[inspect.Parameter, ...] | None = tuple(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # some builtins do not tell
            self._parameters = None
        if self._parameters is not None and not self._takes_all:
            unknown = set(self.kwargs) - {p.name for p in self._parameters}
            if unknown:
                raise RewardError(
                    f"reward {self.name} has no parameter {', '.join(sorted(unknown))}; it takes "
                    f"{', '.join(p.name for p in self._parameters)}"
                )

    @property
    def _takes_all(self) -> bool:
        return self._parameters is not None and any(p.kind is p.VAR_KEYWORD for p in self._parameters)

    def __call__(self, sample: Sample, prompt: Prompt) -> float:
        """Score one sample. Raises :class:`RewardError` or whatever the function raises."""
        value = self._call(sample, prompt)
        if value is None:
            raise RewardError(f"reward {self.name} returned None for sample {sample.uid}; expected a number")
        try:
            score = float(value)
        except (TypeError, ValueError):
            text = f"reward {self.name} returned {value!r} for sample {sample.uid}; expected a number"
            raise RewardError(text) from None
        if not math.isfinite(score):
            raise RewardError(f"reward {self.name} returned {score} for sample {sample.uid}; expected a finite number")
        return score

    def _call(self, sample: Sample, prompt: Prompt) -> Any:
        given = {**columns(sample, prompt), **self.kwargs}
        if self._parameters is None:
            return self.fn(given["prompt"], given["response"])
        leading = [p for p in self._parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
        pair = ("prompt", "response")
        by_position = len(leading) == 2 and all(p.name == own or p.name not in given for p, own in zip(leading, pair))
        positional: list[Any] = [given[own] for own in pair] if by_position else []
        keywords: dict[str, Any] = {}
        for p in self._parameters[len(positional) :]:
            if p.kind is p.VAR_POSITIONAL:
                continue
            if p.kind is p.VAR_KEYWORD:
                used = {q.name for q in self._parameters} | set(pair if positional else ())
                keywords.update({name: value for name, value in given.items() if name not in used})
            elif p.name in given:
                if p.kind is p.POSITIONAL_ONLY:
                    positional.append(given[p.name])
                else:
                    keywords[p.name] = given[p.name]
            elif p.default is p.empty:
                raise RewardError(
                    f"reward {self.name} asks for {p.name!r}, which sample {sample.uid} does not have; there is "
                    f"{', '.join(given)}"
                )
        return self.fn(*positional, **keywords)


def columns(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    """What a reward may ask for, by name."""
    return {
        **prompt.extra,
        "prompt": prompt.text if prompt.text is not None else _last_user_text(prompt.messages or []),
        "response": sample.text,
        "answer": prompt.answer,
        "data_source": prompt.data_source,
        "messages": prompt.messages,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "finish_reason": sample.finish_reason,
    }


def _last_user_text(messages: list[dict[str, Any]]) -> str:
    said = [m["content"] for m in messages if m.get("role") == "user"] or [messages[-1]["content"] if messages else ""]
    return said[-1] if isinstance(said[-1], str) else str(said[-1])


def reasoning_gym_score(response: str, data_source: str, entry: Any = None, extract: str = "auto") -> float:
    """The verifier of the reasoning-gym task that a row comes from.

    ``extract`` says what of the response is the answer: ``tag`` the text between <answer> and </answer> (none: 0),
    ``text`` the whole response, ``auto`` the tag when there is one and the whole response otherwise. Many verifiers
    give part of the score to a text that contains the answer.
    """
    if entry is None:
        raise RewardError(
            f"reward reasoning_gym: the row of {data_source!r} has no reasoning-gym entry; use it with data from "
            "reasoning_gym:TASK, or name your own function in reward.function"
        )
    if extract not in ("auto", "tag", "text"):
        raise RewardError(f"reward reasoning_gym: extract={extract!r}; expected auto, tag or text")
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(response) if extract != "text" else None
    answer = tagged if tagged is not None or extract == "tag" else response.strip()
    task = entry.get("metadata", {}).get("source_dataset", data_source)
    return float(_verifier(task)(answer, entry))


_verifiers: dict[str, Callable[[str | None, Any], float]] = {}
_verifiers_lock = threading.Lock()


def _verifier(task: str) -> Callable[[str | None, Any], float]:
    with _verifiers_lock:
        if task not in _verifiers:
            import reasoning_gym

            _verifiers[task] = reasoning_gym.get_score_answer_fn(task)
        return _verifiers[task]


def resolve_reward(function: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """A reward from ``module:name``, ``file.py:name``, ``reasoning_gym``, a Python function, or a module of torch.

    Modules are looked for in the working directory too. Whatever has ``scores(pairs)`` is a reward already. Raises
    :class:`RewardError` naming what is missing.
    """
    if isinstance(function, RewardFunction):
        return RewardFunction(function.fn, {**function.kwargs, **(kwargs or {})}, function.name)
    if hasattr(function, "scores") and hasattr(function, "at_boundary"):
        return function
    if "torch" in sys.modules and isinstance(function, sys.modules["torch"].nn.Module):
        from rl3d.rewards.models import ModelReward

        parameter = next(function.parameters(), None)
        return ModelReward(function, device="cpu" if parameter is None else parameter.device)
    if not isinstance(function, str):
        return RewardFunction(function, kwargs)
    if function == "reasoning_gym":
        if importlib.util.find_spec("reasoning_gym") is None:
            raise RewardError("reward reasoning_gym needs reasoning-gym; pip install reasoning-gym")
        return RewardFunction(reasoning_gym_score, kwargs, "reasoning_gym")
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name:
        raise RewardError(f"reward {function!r}: expected module:name, file.py:name or reasoning_gym")
    found: Any = _module(place, function)
    for part in name.split("."):
        if not hasattr(found, part):
            raise RewardError(f"reward {function!r}: {place} has no {name!r}")
        found = getattr(found, part)
    if "torch" in sys.modules and isinstance(found, sys.modules["torch"].nn.Module):
        return resolve_reward(found)
    return RewardFunction(found, kwargs, function)


def _module(place: str, function: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise  # the module is there; something that it imports is not
            raise RewardError(f"reward {function!r}: no module {place!r}, seen from {os.getcwd()}") from None
    path = Path(place).expanduser()
    if not path.is_file():
        raise RewardError(f"reward {function!r}: no such file {place!r}, seen from {os.getcwd()}")
    name = f"rl3d_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
