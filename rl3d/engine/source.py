"""Where an actor's weights and tokenizer come from: a Hugging Face directory, a hub id, or a model object."""

import atexit
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl3d.data.tokenizers import load_tokenizer, pad_id, stop_ids
from rl3d.distributed.bootstrap import Runtime
from rl3d.engine.download import local_directory


@dataclass(frozen=True)
class ModelSource:
    """A directory with configuration and safetensors, and what is known about its tokens."""

    directory: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    pad_token_id: int


def open_model(model: Any, tokenizer: Any, runtime: Runtime) -> ModelSource:
    """Turn what the user gave into a directory that every rank reads slices from.

    A hub id is fetched once per node. A model object is written once per node to a temporary directory that goes away
    with the process.

    Raises:
        FileNotFoundError: a path without a ``config.json``.
        HubError: a hub id that is not to be had.
        TypeError: neither a path nor a Hugging Face model.
    """
    if isinstance(model, str | Path):
        directory = local_directory(model, runtime)
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(
                f"model {str(model)!r}: no config.json there; give a Hugging Face directory, a hub id "
                "(org/name), or make a directory with `rl3d prepare`"
            )
    elif hasattr(model, "save_pretrained") and hasattr(model, "config"):
        directory = _write(model, tokenizer, runtime)
    else:
        raise TypeError(f"model is a {type(model).__name__}; expected a directory, a hub id or a Hugging Face model object")
    if tokenizer is None:
        tokenizer = load_tokenizer(directory) if _has_tokenizer(directory) else None
    return ModelSource(directory, tokenizer, stop_ids(directory, tokenizer), pad_id(directory, tokenizer))


def with_tokenizer(source: ModelSource, tokenizer: Any) -> ModelSource:
    """The same directory with another tokenizer and its special tokens."""
    directory = source.directory
    return replace(source, tokenizer=tokenizer, stop_token_ids=stop_ids(directory, tokenizer),
                   pad_token_id=pad_id(directory, tokenizer))  # fmt: skip


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _write(model: Any, tokenizer: Any, runtime: Runtime) -> Path:
    first_on_node = runtime.nodes.index(runtime.nodes[runtime.rank]) == runtime.rank
    place = None
    if first_on_node:
        place = tempfile.mkdtemp(prefix="rl3d-model-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    places: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(places, place, group=runtime.cpu_group)
    return Path(places[runtime.nodes.index(runtime.nodes[runtime.rank])])
