"""What `rl3d config` prints: every key with its type, default and meaning."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl3d.config.base import ConfigError, Problem, Section, closest
from rl3d.config.run import RunConfig, section_of


@dataclass(frozen=True)
class KeyInfo:
    """One configuration key as a person needs it."""

    key: str
    kind: str
    default: str
    meaning: str
    section: bool = False


def _kind(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return "mapping"
        return {int: "int", float: "float", str: "text", bool: "bool", Any: "any"}.get(annotation, str(annotation))
    name = getattr(origin, "__name__", str(origin))
    if name == "Literal":
        return " | ".join(str(arg) for arg in args)
    if name == "Annotated":
        return _kind(args[0])
    if name in ("UnionType", "Union"):
        return " | ".join(_kind(arg) for arg in args)
    if name == "list":
        return f"list of {_kind(args[0])}"
    if name == "tuple":
        return "[" + ", ".join(_kind(arg) for arg in args) + "]"
    return "mapping" if name == "dict" else name


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _walk(cls: type[BaseModel], prefix: str) -> Iterator[KeyInfo]:
    for name, field in cls.model_fields.items():
        inner = section_of(field.annotation)
        default = _default(field)
        yield KeyInfo(prefix + name, _kind(field.annotation), default, field.description or "", inner is not None)
        if inner is not None:
            several = get_origin(field.annotation) in (list, dict)
            yield from _walk(inner, f"{prefix}{name}.{'N.' if several else ''}")


def explain(key: str | None = None) -> list[KeyInfo]:
    """All keys, or those at and below ``key``. Raises :class:`ConfigError` for a key that does not exist."""
    everything = list(_walk(RunConfig, ""))
    if key is None:
        return everything
    found = [info for info in everything if info.key == key or info.key.startswith(key + ".")]
    if not found:  # the last part alone is what people remember
        found = [info for info in everything if info.key.split(".")[-1] == key]
    if not found:
        near = closest(key, [i.key for i in everything]) or closest(key, [i.key.split(".")[-1] for i in everything])
        hint = f"did you mean {near!r}?" if near else "`rl3d config` lists all keys"
        raise ConfigError(Problem(key, f"no such configuration key; {hint}"))
    return found
