"""Shapes of well-known models: their ``config.json``, shipped in configs/models/, found by a short name.

They hold sizes, no weights: enough to plan layouts, predict memory and time, and build random weights.
"""

import difflib
import json
from pathlib import Path
from typing import Any

from rl3d.config import shipped
from rl3d.config.hub import HubId
from rl3d.models.architecture import UnsupportedModelError


def shape_names() -> tuple[str, ...]:
    """Names that :func:`shape` knows, for example ``llama2-7b``."""
    return tuple(sorted(_files()))


def shape(name: str) -> dict[str, Any]:
    """The Hugging Face configuration of a shipped shape.

    Raises :class:`UnsupportedModelError` for a name that is not there; the message gives the closest ones.
    """
    files = _files()
    if name.lower() not in files:
        close = difflib.get_close_matches(name.lower(), files, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(sorted(files))}"
        raise UnsupportedModelError(f"{name!r} is not a shipped shape; {hint}")
    return json.loads(files[name.lower()].read_text(encoding="utf-8"))


def find_model(text: str) -> tuple[str, dict[str, Any]]:
    """Name and Hugging Face configuration of what a command calls MODEL.

    A model directory, a ``config.json``, a shipped shape, a directory under models/, or a hub id (``org/name``, whose
    ``config.json`` alone is taken from the cache, or fetched), in this order.

    Raises:
        UnsupportedModelError: anything else; the message gives the closest shapes.
        HubError: a hub id that is neither in the cache nor to be had.
    """
    given = Path(text).expanduser()
    for place in (given, Path("models") / given):
        file = place / "config.json" if place.is_dir() else place
        if file.is_file():
            return (place.stem if place == file else place.resolve().name), _read(file)
        if place == given and text.lower() in _files():
            return text.lower(), shape(text)
    if given.is_dir():
        raise UnsupportedModelError(f"{text}: the directory has no config.json; give a Hugging Face model directory")
    hub_id = None if given.parent.is_dir() else HubId.parse(text)
    if hub_id is not None:
        return hub_id.repo.rpartition("/")[2], _read(hub_id.file("config.json"))
    try:
        return text, shape(text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"no model directory and no config.json at {text}, and {error}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file}: expected a JSON object, a Hugging Face configuration")
    return config


def _files() -> dict[str, Path]:
    return {file.stem: file for file in (shipped.folder("configs") / "models").glob("*.json")}
