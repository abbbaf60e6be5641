"""Reading slices of tensors out of a Hugging Face checkpoint: safetensors, or PyTorch ``.bin`` files."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its configuration says; the message names file and tensor."""


class ConfigurationMissing(CheckpointError):
    """A Megatron checkpoint that says nothing about the model, without a directory that does."""


class HFReader:
    """Opens the files of one model directory lazily and reads slices, never whole files. Threads may share it.

    Args:
        directory: a directory with ``model.safetensors`` or an index and its shards.

    Raises:
        CheckpointError: neither is there, or the index names a file that is missing.
    """

    index_file, single_file, shards = INDEX_FILE, SINGLE_FILE, "model-*-of-*.safetensors"

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._lock = Lock()
        index, single = self.directory / self.index_file, self.directory / self.single_file
        if index.is_file():
            try:
                self._files = dict(json.loads(index.read_text(), object_pairs_hook=_once)["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from None
            missing = sorted({name for name in self._files.values() if not (self.directory / name).is_file()})
            if missing:
                raise CheckpointError(f"{index} lists files that do not exist: {', '.join(missing)}")
            if single.is_file():
                raise CheckpointError(
                    f"{self.directory} has both {single.name} and {index.name}: readers disagree on which counts; remove one"
                )
        elif single.is_file():
            self._files = dict.fromkeys(self._handle(single.name).keys(), single.name)
        else:
            raise CheckpointError(
                f"{self.directory} has neither {single.name} nor {index.name}; expected a safetensors checkpoint"
            )

    def _handle(self, file: str) -> Any:
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = self._open_file(self.directory / file)
                except CheckpointError:
                    raise
                except Exception as error:
                    raise CheckpointError(f"{self.directory / file} cannot be read: {error}") from error
            return self._open[file]

    def _open_file(self, path: Path) -> Any:
        return safe_open(str(path), framework="pt", device="cpu")

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
        files = sorted(p.name for p in self.directory.glob(self.shards) if p.name not in listed)
        return out + [f"unexpected file {file}: no index lists it" for file in files]

    def _slice(self, name: str):
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name!r} is not in {self.directory}")
        handle = self._handle(file)
        if name not in handle.keys():
            raise CheckpointError(f"{self.directory / self.index_file} places {name!r} in {file}, but it is not there")
        return handle.get_slice(name)

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None,
             matrix: int | None = None) -> Tensor:  # fmt: skip
        """Rows ``[a, b)`` of a tensor, optionally only columns ``[a, b)``; of one matrix of a stack of them."""
        part = self._slice(name)
        if matrix is not None:
            across = slice(None) if columns is None else slice(*columns)
            return part[matrix : matrix + 1, rows[0] : rows[1], across][0]
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ; Python's reader takes the last of two."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is listed twice")
    return out


class BinReader(HFReader):
    """The same for ``pytorch_model.bin``, or an index and its shards: mapped into memory, nothing but tensors unpickled."""

    index_file, single_file, shards = "pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model-*-of-*.bin"

    def _open_file(self, path: Path) -> Any:
        try:
            try:
                held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:  # files from before torch 1.6 cannot be mapped
                if "mmap can only be used" not in str(error):
                    raise
                held = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            what = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{path} cannot be read: its pickle asks for {what[1] if what else 'more than tensors'}; refused, only "
                f"tensors are loaded"
            ) from None
        if not isinstance(held, Mapping):
            raise CheckpointError(f"{path} holds a {type(held).__name__}; expected a mapping of names to tensors")
        other = [f"{k!r} is a {type(v).__name__}" for k, v in held.items() if not isinstance(v, Tensor)]
        if other:
            raise CheckpointError(f"{path}: {other[0]}; expected a mapping of names to tensors and nothing else")
        return _HeldTensors(held)


class _HeldTensors:
    """Tensors that are in memory, with the interface of an open safetensors file."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "_HeldSlice":
        return _HeldSlice(self._tensors[name])


class _HeldSlice:
    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        codes = {dtype: code for code, dtype in _DTYPES.items()}
        return codes.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]


def is_bin(directory: Path) -> bool:
    """Whether the directory's weights are PyTorch files: as transformers does, safetensors come first."""
    names = [(kind.single_file, kind.index_file) for kind in (HFReader, BinReader)]
    safe, old = (any((directory / name).is_file() for name in pair) for pair in names)
    return old and not safe


def open_hf(directory: str | Path) -> HFReader:
    """The reader for what is there; raises :class:`CheckpointError` when that is nothing."""
    return BinReader(directory) if is_bin(Path(directory)) else HFReader(directory)
