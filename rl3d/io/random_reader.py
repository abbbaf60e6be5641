"""Weights that are drawn when they are read: a model of any size and shape without a checkpoint.

A directory with ``config.json`` and :data:`RANDOM_FILE`, and no safetensors, stands for a model with random weights. A
value depends on the seed, the tensor's name and its position only, so that every layout reads the same model (on one
kind of device: CPU and CUDA draw differently), and a rank draws little more than the rows that it keeps.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RANDOM_FILE = "random_weights.json"
_ROWS = 256  # rows drawn at a time; a part of the definition of the weights


def write_random_model(directory: str | Path, config: Mapping[str, Any], seed: int = 0, std: float = 0.02) -> Path:
    """Make such a directory. ``std``: of all matrices; norms are ones, biases zeros. Returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RANDOM_FILE).write_text(json.dumps({"seed": seed, "std": std}) + "\n")
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return directory


def is_random(directory: str | Path) -> bool:
    """Whether the directory stands for random weights."""
    return (Path(directory) / RANDOM_FILE).is_file()


class RandomReader:
    """Reads like :class:`~rl3d.io.hf_reader.HFReader` what was never written.

    Args:
        directory: of :func:`write_random_model`.
        device: where values are drawn.
    """

    def __init__(self, directory: str | Path, device: torch.device):
        settings = json.loads((Path(directory) / RANDOM_FILE).read_text())
        self._directory = Path(directory)
        self._seed, self._std, self._device = settings["seed"], settings["std"], device
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], tied_head: str | None = None) -> None:
        """Take the shapes from the rules: there is nothing to compare them with."""
        self._shapes = dict(expected)

    def file(self, name: str) -> Path:
        """What stands for the file that the tensor would be in."""
        return self._directory / RANDOM_FILE

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Rows ``[a, b)`` of a tensor in fp32, optionally only columns ``[a, b)``."""
        shape, (first, last) = self._shapes[name], rows
        if len(shape) == 1:
            return torch.full((last - first,), 0.0 if name.endswith("bias") else 1.0, device=self._device)
        a, b = columns or (0, shape[1])
        parts = []
        for block in range(first // _ROWS, -(-last // _ROWS)):
            start = block * _ROWS
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}/{block}".encode()))
            values = torch.empty(min(_ROWS, shape[0] - start), *shape[1:], device=self._device)
            values.normal_(std=self._std, generator=generator)
            parts.append(values[max(first - start, 0) : last - start, a:b])
        return torch.cat(parts) if parts else torch.empty(0, b - a, device=self._device)
