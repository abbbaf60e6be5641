"""What a checkpoint is, as data: format, the layout it is cut for, parameters, bytes, fingerprints."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from rl3d.io.hf_reader import ConfigurationMissing
from rl3d.io.source import Source
from rl3d.io.torch_dist import TorchDistReader
from rl3d.reshard.fingerprint import fold


def describe(path: str | Path, hf: str | Path | None = None, dtype: torch.dtype | None = None,
             fingerprints: bool = False) -> dict[str, Any]:  # fmt: skip
    """Everything about a checkpoint that its files' headers say; with ``fingerprints`` every value is read as well.

    A Megatron checkpoint without configuration (neither beside it nor in ``hf``) is described as stored: its tensors,
    under their names in the files.

    Returns:
        ``path``, ``format``, ``family`` (None as stored), ``layout`` (words), ``files`` (name -> bytes), ``bytes`` of all
        parameters, ``fingerprint`` of all, and ``parameters``: ``name``, ``shape``, ``dtype``, ``bytes``, ``fingerprint``.

    Raises:
        CheckpointError: the files do not hold what the configuration says.
    """
    try:
        source = Source(path, hf, dtype)
    except ConfigurationMissing as error:
        return _as_stored(Path(path), str(error))
    prints: dict[str, int] = {}
    parameters = []
    for mapped in source.parameters:
        spec, kind = mapped.spec, source.dtype_of(mapped)
        entry = {"name": spec.name, "shape": list(spec.shape), "dtype": str(kind).removeprefix("torch."),
                 "bytes": spec.numel * kind.itemsize}  # fmt: skip
        if fingerprints:
            prints[spec.name] = source.fingerprint(mapped)
            entry["fingerprint"] = f"{prints[spec.name]:016x}"
        parameters.append(entry)
    return {
        "path": str(source.weights), "format": source.kind, "family": source.arch.family, "layout": _layout(source),
        "files": _files(source.weights), "bytes": sum(p["bytes"] for p in parameters), "parameters": parameters,
        "fingerprint": fold(prints) if prints else None,
    }  # fmt: skip


def _files(directory: Path) -> dict[str, int]:
    files = [directory] if directory.is_file() else sorted(p for p in directory.iterdir() if p.is_file())
    return {p.name: p.stat().st_size for p in files}


def _layout(source: Source) -> str:
    if source.kind == "rl3d":
        state = json.loads((source.path / "state.json").read_text())
        return f"written by {state.get('world_size')} ranks at {state.get('layout')}, step {state.get('step')}"
    if source.kind != "torch_dist":
        return "whole tensors"
    manifest = source.manifest()
    return _ranks(source.weights) + (f", cut for {manifest['layout']}" if manifest and "layout" in manifest else "")


def _ranks(directory: Path) -> str:
    found = [re.fullmatch(r"__(\d+)_\d+\.distcp", p.name) for p in directory.iterdir()]
    count = len({m[1] for m in found if m})
    return f"files of {count} rank{'s' * (count != 1)}; loads at any layout"


def _as_stored(path: Path, why: str) -> dict[str, Any]:
    reader = TorchDistReader(path)
    parameters = [
        {"name": name, "shape": list(shape), "dtype": str(kind).removeprefix("torch."), "pieces": pieces,
         "bytes": torch.Size(shape).numel() * kind.itemsize}
        for name, shape, kind, pieces in reader.stored()
    ]  # fmt: skip
    return {
        "path": str(reader.directory), "format": "torch_dist", "family": None, "layout": _ranks(reader.directory),
        "files": _files(reader.directory), "bytes": sum(p["bytes"] for p in parameters), "parameters": parameters,
        "fingerprint": None, "note": why,
    }  # fmt: skip
