"""Checkpoints of mixtures that hold all experts of a layer in one tensor, read as if they lay one by one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rl3d.io.hf_reader import HFReader
from rl3d.models import Fused


class FusedReader:
    """Reads like the reader it is given, with the tensors of the rules in place of fused ones.

    Args:
        fused: what may be there, from :func:`rl3d.models.fused_tensors`; what is not there is read as usual.
    """

    def __init__(self, reader: HFReader, fused: Mapping[str, Fused]):
        self._reader = reader
        self._fused = {name: tensor for name, tensor in fused.items() if name in reader.names}
        self._where = {
            part: (name, expert, row) for name, tensor in self._fused.items() for part, expert, row in tensor.parts
        }

    @property
    def names(self) -> set[str]:
        return self._reader.names - set(self._fused) | set(self._where)

    def file(self, name: str) -> Path:
        return self._reader.file(self._name(name))

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._name(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is not fused."""
        return self._reader.shape(name)

    def _name(self, name: str) -> str:
        return self._where[name][0] if name in self._where else name

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Rows ``[a, b)`` of a tensor, optionally only columns ``[a, b)``."""
        if name not in self._where:
            return self._reader.read(name, rows, columns)
        fused, expert, first = self._where[name]
        return self._reader.read(fused, (first + rows[0], first + rows[1]), columns, expert)

    def check(self, expected: Mapping[str, tuple[int, ...]], tied_head: str | None = None) -> None:
        """As the reader's: fused tensors are expected in place of those that they hold."""
        kept = {name: shape for name, shape in expected.items() if name not in self._where}
        self._reader.check({**kept, **{name: tensor.shape for name, tensor in self._fused.items()}}, tied_head)
