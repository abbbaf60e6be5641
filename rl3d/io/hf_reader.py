"""Reading slices of tensors out of a Hugging Face safetensors checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its configuration says; the message names file and tensor."""


class HFReader:
    """Opens the files of one model directory lazily and reads slices, never whole files.

    Args:
        directory: a directory with ``model.safetensors`` or an index and its shards.

    Raises:
        CheckpointError: neither is there, or the index names a file that is missing.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[str, str] = {}
        self._open: dict[str, safe_open] = {}
        index = self.directory / INDEX_FILE
        if index.is_file():
            try:
                self._files = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from None
            missing = sorted({name for name in self._files.values() if not (self.directory / name).is_file()})
            if missing:
                raise CheckpointError(f"{index} lists files that do not exist: {', '.join(missing)}")
            if (self.directory / SINGLE_FILE).is_file():
                raise CheckpointError(
                    f"{self.directory} has both {SINGLE_FILE} and {INDEX_FILE}: readers disagree on which counts; remove one"
                )
        elif (self.directory / SINGLE_FILE).is_file():
            self._files = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise CheckpointError(
                f"{self.directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; expected a safetensors checkpoint"
            )

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.directory / file), framework="pt", device="cpu")
            except Exception as error:
                raise CheckpointError(f"{self.directory / file} cannot be read: {error}") from error
        return self._open[file]

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises :class:`CheckpointError` for anything but floating-point weights."""
        code = self._slice(name).get_dtype()
        if code not in _DTYPES:
            raise CheckpointError(
                f"{name} has dtype {code} in {self.file(name)}; expected floating-point weights ({', '.join(_DTYPES)})"
            )
        return _DTYPES[code]

    def file(self, name: str) -> Path:
        """The file that the tensor is in."""
        return self.directory / self._files[name]

    def _unlisted(self) -> list[str]:
        """Tensors and files that lie beside what the index lists, in words."""
        listed: dict[str, set[str]] = {}
        for name, file in self._files.items():
            listed.setdefault(file, set()).add(name)
        out = [
            f"unexpected: {name} in {file}, where the index does not place it"
            for file, names in sorted(listed.items())
            for name in sorted(set(self._handle(file).keys()) - names)
        ]
        files = sorted(p.name for p in self.directory.glob("model-*-of-*.safetensors") if p.name not in listed)
        return out + [f"unexpected file {file}: no index lists it" for file in files]

    def _slice(self, name: str):
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name!r} is not in {self.directory}")
        handle = self._handle(file)
        if name not in handle.keys():
            raise CheckpointError(f"{self.directory / INDEX_FILE} places {name!r} in {file}, but it is not there")
        return handle.get_slice(name)

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Rows ``[a, b)`` of a tensor, optionally only columns ``[a, b)``."""
        part = self._slice(name)
        if columns is None:
            return part[rows[0] : rows[1]]
        return part[rows[0] : rows[1], columns[0] : columns[1]]

    def check(self, expected: Mapping[str, tuple[int, ...]], tied_head: str | None = None) -> None:
        """Prove that the checkpoint holds exactly the expected tensors before anything is read.

        Args:
            expected: tensor names and shapes.
            tied_head: a head that a tied checkpoint may or may not contain beside the embedding.

        Raises:
            CheckpointError: missing, unexpected or mis-shaped tensors, each by name.
        """
        extra = {n for n in self.names - set(expected) if n != tied_head and not n.endswith("rotary_emb.inv_freq")}
        problems = [f"missing: {name}" for name in sorted(set(expected) - self.names)] + self._unlisted()
        problems += [f"unexpected: {name}" for name in sorted(extra)]
        for name in sorted(set(expected) & self.names):
            if self.shape(name) != tuple(expected[name]):
                found, right = self.shape(name), tuple(expected[name])
                problems.append(f"{name}: shape {found}, expected {right} (in {self._files[name]})")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise CheckpointError(f"{self.directory} does not match its config.json: {shown}")
