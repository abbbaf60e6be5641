"""Rows of prompts: from JSONL files, from reasoning-gym tasks, from the tiny tasks, and mixtures of these."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

GENERATED_ROWS = 1000
"""Rows of a generated task when no size is given."""

RESERVED = ("prompt", "response", "prompt_ids", "response_ids", "messages", "finish_reason")
"""What a reward function gets from the sample itself; a column of that name would be hidden by it."""


class DataError(ValueError):
    """Data that cannot be used: the message names the place (file:line), the value and what was expected."""


@dataclass
class Row:
    """One row: a prompt as text or as chat messages, and what the reward may want to know. ``where`` is for errors."""

    prompt: str | list[dict[str, Any]]
    answer: Any = None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def load_rows(
    spec: Any,
    *,
    size: int | None = None,
    seed: int = 0,
    prompt_key: str = "prompt",
) -> list[Row]:
    """Rows of one source or of a mixture.

    A source is a JSONL path, ``reasoning_gym:TASK``, ``tiny:TASK``, or a mapping (or object) with ``source``,
    ``weight`` and ``options``; a list of sources is a mixture.

    ``size`` is the number of rows altogether: the first ones of a file, or as many as a generated task is asked for.
    Without it a file gives all its rows and a generated task :data:`GENERATED_ROWS`. In a mixture each source has a share
    of the rows in proportion to its weight (default 1), spread evenly so that every stretch of rows has nearly these
    proportions; a source with fewer rows than its share starts again from its first. Without ``size`` the mixture is as
    long as it takes to use every row of every source.

    ``seed`` makes generated tasks; ``options`` go to the task and may set its own ``seed``.

    Raises :class:`DataError` on unreadable rows or unknown tasks, ``ModuleNotFoundError`` without reasoning-gym.
    """
    sources = [_source(item) for item in (spec if isinstance(spec, list | tuple) else [spec])]
    if not sources:
        raise DataError("no data source given; expected a JSONL path, reasoning_gym:TASK or tiny:TASK")
    if size is not None and size < 1:
        raise DataError(f"data size {size} must be at least 1")
    if len(sources) == 1:
        return _read(sources[0], size, seed, prompt_key)
    total_weight = sum(source.weight for source in sources)
    fractions = [source.weight / total_weight for source in sources]
    if size is None:
        parts = [_read(source, None, seed, prompt_key) for source in sources]
        total = max(-(-len(part) // fraction) for part, fraction in zip(parts, fractions))
        shares = _shares(int(total), fractions)
    else:
        shares = _shares(size, fractions)
        parts = [_read(source, share, seed, prompt_key) if share else [] for source, share in zip(sources, shares)]
    return [parts[source][position % len(parts[source])] for source, position in _interleave(shares)]


@dataclass(frozen=True)
class _Source:
    name: str
    weight: Fraction = Fraction(1)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        kind, colon, task = self.name.partition(":")
        return kind if colon and task and kind in ("reasoning_gym", "tiny") else "jsonl"


def _source(item: Any) -> _Source:
    if isinstance(item, str | Path):
        return _Source(str(item))
    get = item.get if isinstance(item, Mapping) else lambda name, default=None: getattr(item, name, default)
    name, weight = get("source"), get("weight")
    if not name:
        raise DataError(f"data source {item!r} has no 'source'; expected {{source, weight, options}}")
    weight = Fraction(1 if weight is None else weight).limit_denominator(10**6)
    if weight <= 0:
        raise DataError(f"data source {name}: weight {get('weight')} must be greater than 0")
    return _Source(str(name), weight, get("options") or {})


def _read(source: _Source, size: int | None, seed: int, prompt_key: str) -> list[Row]:
    if source.kind == "jsonl":
        if source.options:
            raise DataError(f"{source.name}: a JSONL file takes no options, got {sorted(source.options)}")
        return read_jsonl(source.name, prompt_key=prompt_key, size=size)
    task = source.name.partition(":")[2]
    options = {"size": GENERATED_ROWS if size is None else size, "seed": seed, **source.options}
    if source.kind == "tiny":
        from rl3d.data.tiny import tiny_rows

        return tiny_rows(task, **options)
    return _reasoning_gym(task, options)


def _shares(total: int, fractions: Sequence[Fraction]) -> list[int]:
    """Largest remainders, ties to the earlier source."""
    exact = [total * fraction for fraction in fractions]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _interleave(shares: Sequence[int]) -> list[tuple[int, int]]:
    """(source, position) pairs: position k of a source with share s is due at (2k + 1) / 2s of the way."""
    due = [(Fraction(2 * k + 1, 2 * share), source, k) for source, share in enumerate(shares) for k in range(share)]
    return [(source, position) for _, source, position in sorted(due)]


def read_jsonl(path: str | Path, *, prompt_key: str = "prompt", size: int | None = None) -> list[Row]:
    """Rows of a JSONL file: one object a line, blank lines allowed. Errors name file and line."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a JSONL path, reasoning_gym:TASK or tiny:TASK")
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if size is not None and len(rows) == size:
                break
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            rows.append(row_from(record, where=where, prompt_key=prompt_key, data_source=str(path)))
    if not rows:
        raise DataError(f"{path}: no rows in it; expected one JSON object a line with {prompt_key!r} in each")
    return rows


def row_from(record: Any, *, where: str, prompt_key: str = "prompt", data_source: str = "") -> Row:
    """A row from a mapping with a prompt and other columns. Raises :class:`DataError` naming ``where``."""
    if isinstance(record, Row):
        return record
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected an object with {prompt_key!r}, got {type(record).__name__}")
    if prompt_key not in record:
        raise DataError(f"{where}: no {prompt_key!r} among its columns {sorted(record)}; name it with data.prompt_key")
    columns = dict(record)
    prompt = check_prompt(columns.pop(prompt_key), where)
    answer = columns.pop("answer", None)
    named_source = columns.pop("data_source", None)
    for name in columns:
        if name in RESERVED:
            raise DataError(f"{where}: column {name!r} has the name of something rewards get already; rename it")
    return Row(prompt, answer, data_source if named_source is None else str(named_source), columns, where)


def check_prompt(prompt: Any, where: str) -> str | list[dict[str, Any]]:
    """Text with something in it, or messages ``{"role": ..., "content": ...}``. Raises :class:`DataError`."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty; remove the row or give it text")
        return prompt
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: the prompt is {prompt!r}; expected text or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f'{where}: message {message!r} must be like {{"role": "user", "content": "..."}}')
    if not any(message["content"] for message in prompt):
        raise DataError(f"{where}: the prompt is empty: no message has content")
    return [dict(message) for message in prompt]


def rows_from(records: Iterable[Any], prompt_key: str = "prompt") -> list[Row]:
    """Rows from Python objects: :class:`Row`, mappings, or plain texts."""
    return [
        Row(check_prompt(record, f"row {i}"), where=f"row {i}")
        if isinstance(record, str)
        else row_from(record, where=f"row {i}", prompt_key=prompt_key)
        for i, record in enumerate(records)
    ]


def _reasoning_gym(task: str, options: Mapping[str, Any]) -> list[Row]:
    """Rows of a reasoning-gym task. Each keeps its whole entry, with which the task's verifier scores a response."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        text = f"reasoning_gym:{task} needs reasoning-gym; pip install reasoning-gym"
        raise ModuleNotFoundError(text, name="reasoning_gym") from None
    if task not in DATASETS:
        near = [name for name in sorted(DATASETS) if set(task.split("_")) & set(name.split("_"))]
        raise DataError(f"reasoning_gym:{task}: no such task; near it: {', '.join(near) or ', '.join(sorted(DATASETS))}")
    try:
        entries = reasoning_gym.create_dataset(task, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"reasoning_gym:{task}: options {dict(options)} are not accepted: {error}") from error
    return [
        Row(entry["question"], entry["answer"], task, {"entry": entry}, f"reasoning_gym:{task}[{i}]")
        for i, entry in enumerate(entries)
    ]
