"""What every section of the configuration shares: strict keys, and errors that a person can act on."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rl3d.layout.parallel import LayoutError

ABSENT: Any = object()
KNOWN_KEYS: list[str] = []
"""Dotted names of every configuration key; filled by :mod:`rl3d.config.run`, read for "did you mean"."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the dotted key, its value, what was expected and how to mend it."""

    key: str
    text: str
    value: Any = ABSENT

    def under(self, prefix: str) -> "Problem":
        """The same problem seen from an enclosing section."""
        key = ".".join(part for part in (prefix, self.key) if part)
        return Problem(key, self.text, self.value)

    def __str__(self) -> str:
        if self.value is ABSENT:
            return f"{self.key}: {self.text}" if self.key else self.text
        shown = repr(self.value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return f"{self.key} = {shown}: {self.text}"


class ConfigError(ValueError):
    """A configuration that cannot run. One line per problem: key, value, what was expected, remedy."""

    def __init__(self, problems: Sequence[Problem] | Problem | str, source: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = list(problems)
        self.source = source
        super().__init__("\n".join(([source] if source else []) + [str(p) for p in self.problems]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; so are values of the wrong kind, at construction and assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_problems(error, type(self))) from None


def closest(name: str, options: Iterable[str]) -> str | None:
    """The option most like ``name``, or None when nothing is near."""
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_key(name: str, options: Iterable[str]) -> str:
    """Text for a key that does not exist, with the name that was probably meant."""
    options = list(options)
    near = closest(name, options)
    elsewhere = [key for key in KNOWN_KEYS if key.split(".")[-1] == name]
    if near:
        return f"unknown key; did you mean {near!r}?"
    if elsewhere:
        return f"unknown key here; it exists as {' and '.join(map(repr, elsewhere))}"
    return f"unknown key; expected one of {', '.join(options)}"


_PHRASES = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "dict_type": "expected a mapping of keys to values",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "model_type": "expected a mapping of keys to values",
    "model_attributes_type": "expected a mapping of keys to values",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _remedy(cls: type[BaseModel], name: str) -> str:
    field = cls.model_fields.get(name)
    if field is None:
        return ""
    default = "" if field.is_required() or field.default_factory else f" (default {field.default!r})"
    return f"; {name}: {field.description}{default}" if field.description else default


def _one(error: Any, cls: type[BaseModel]) -> list[Problem]:
    kind, location, context = error["type"], error["loc"], error.get("ctx", {})
    key = ".".join(str(part) for part in location)
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        return [problem.under(key) for problem in inner.problems]
    if isinstance(inner, LayoutError):
        return [Problem(key, str(inner), error["input"])]
    name = str(location[0]) if location else ""
    if kind == "extra_forbidden":
        return [Problem(key, unknown_key(str(location[-1]), cls.model_fields), error["input"])]
    if kind == "missing":
        return [Problem(key, f"missing; add it{_remedy(cls, name)}")]
    if kind in _BOUNDS:
        bound, phrase = _BOUNDS[kind]
        text = f"expected {phrase} {context[bound]}"
    elif kind == "literal_error":
        text = f"expected {context['expected']}"
    else:
        text = _PHRASES.get(kind) or str(inner or error["msg"])
    return [Problem(key, text + _remedy(cls, name), error["input"])]


_UNION_TAGS = {"int", "float", "str", "constrained-int", "constrained-float"}


def _problems(error: ValidationError, cls: type[BaseModel]) -> list[Problem]:
    """Readable problems of a pydantic error, in the order of the file, one for each key."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        # A union reports one error per member under the member's own tag; a person wrote one value.
        location = tuple(p for p in item["loc"] if not _is_union_tag(p))
        for problem in _one({**item, "loc": location}, cls):
            if problem.key in found:
                merged = _merge(found[problem.key].text, problem.text)
                found[problem.key] = Problem(problem.key, merged, problem.value)
            else:
                found[problem.key] = problem
    return list(found.values())


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and (part in _UNION_TAGS or part.startswith(("literal[", "constrained-", "function-")))


def _merge(first: str, second: str) -> str:
    head, _, tail = first.partition("; ")
    other = second.partition("; ")[0].removeprefix("expected ")
    if other in head:
        return first
    return f"{head} or {other}" + (f"; {tail}" if tail else "")
