"""megatron-core's ``torch_dist`` directories, without a model and without holding more than one parameter.

They are torch.distributed.checkpoint directories plus ``metadata.json``; :mod:`rl3d.io.stored_names` says how parameters
are called in them.
"""

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_crc32_options, set_crc32_options

from rl3d.io.finite import all_finite
from rl3d.io.hf_reader import CheckpointError
from rl3d.io.stored_names import Stored, StoredNames
from rl3d.layout import ParamSpec

CONFIG_FILE, METADATA_FILE, COMMON_FILE = "metadata.json", ".metadata", "common.pt"
TRACKER_FILE = "latest_checkpointed_iteration.txt"


def encoded_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that :func:`encode` writes for a tensor of this shape. Nothing of that size is touched."""
    counter = _Counter()
    checksums = get_crc32_options()
    set_crc32_options(False)  # they would read memory that was never written, and do not change the length
    try:
        torch.save(torch.empty(shape, dtype=dtype), cast(Any, counter))
    finally:
        set_crc32_options(checksums)
    return counter.bytes


def encode(value: Tensor, write: Callable[[Any], Any]) -> None:
    """Write the bytes that stand for one piece of a tensor in a data file, without a second copy of it in memory."""
    value = value.contiguous()
    exact = torch.from_numpy(value.view(-1).view(torch.uint8).numpy())  # a storage of its own, in the same memory:
    stream = _Stream(write)
    torch.save(exact.view(value.dtype).view(value.shape), cast(Any, stream))  # whole storages are saved
    if stream.error is not None:
        raise stream.error


class _Counter:
    """A file that only knows how long it became."""

    bytes = 0

    def write(self, block: Any) -> int:
        self.bytes += len(block)
        return len(block)

    def flush(self) -> None:
        pass


class _Stream:
    """A file that can only be written, from front to back. An error is kept: torch.save would hide it behind its own."""

    def __init__(self, write: Callable[[Any], Any]):
        self._write = write
        self.error: OSError | None = None

    def write(self, block: Any) -> int:
        if self.error is None:
            try:
                self._write(block)
            except OSError as error:
                self.error = error
        return len(block)

    def flush(self) -> None:
        pass


class Place(NamedTuple):
    """A piece of a parameter (offsets and sizes in it) and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def write_metadata(directory: Path, specs: Sequence[ParamSpec], dtypes: Mapping[str, torch.dtype],
                   places: Mapping[str, Sequence[Place]]) -> None:  # fmt: skip
    """Complete a directory whose data files hold what :func:`encode` gave, each piece with one dimension in front for
    every number in the index of its parameter.

    Args:
        specs: all parameters of the model.
        dtypes: canonical name -> dtype.
        places: canonical name -> its pieces, which cover it once.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    names = StoredNames(specs)
    for spec in specs:
        for name, index, extent in names.written(spec):
            if name not in tensors:
                shape = torch.Size((*extent, *spec.shape))
                tensors[name] = TensorStorageMetadata(TensorProperties(dtypes[spec.name]), shape, [])
            for place in places[spec.name]:
                offsets, sizes = torch.Size((*index, *place.offsets)), torch.Size((*[1] * len(index), *place.sizes))
                # interned: pickle tells objects apart
                storage[MetadataIndex(name, offsets)] = _StorageInfo(sys.intern(place.file), place.start, place.length)
                tensors[name].chunks.append(ChunkStorageMetadata(offsets, sizes))
    metadata = Metadata(tensors, planner_data={n: (n,) for n in tensors}, storage_data=storage, version="1.0.0")  # type: ignore
    with (directory / METADATA_FILE).open("wb") as file:
        pickle.dump(metadata, file)
    torch.save({}, directory / COMMON_FILE)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
              "common_backend_version": 1}  # fmt: skip
    (directory / CONFIG_FILE).write_text(json.dumps(config))


def checkpoint_directory(path: Path) -> Path:
    """The directory with the weights: ``path``, or the iteration in it that Megatron-LM's tracker file names.

    Raises :class:`CheckpointError` for other kinds of Megatron checkpoints.
    """
    tracker = path / TRACKER_FILE
    if tracker.is_file():
        word = tracker.read_text().strip()
        path = path / (word if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else word)
    legacy = _legacy(path)
    if legacy:
        raise CheckpointError(
            f"{path} holds {legacy[0]}: a legacy Megatron checkpoint, whose pickled ranks cannot be read safely; convert "
            f"it with the Megatron-LM that wrote it (--ckpt-format torch_dist)"
        )
    return path


def is_torch_dist(path: Path) -> bool:
    """Whether it is a Megatron checkpoint, be it of a kind that :class:`TorchDistReader` refuses."""
    return any((path / name).is_file() for name in (METADATA_FILE, CONFIG_FILE, TRACKER_FILE)) or bool(_legacy(path))


def _legacy(path: Path) -> list[str]:
    return sorted(p.name for pattern in ("mp_rank_*", "iter_*/mp_rank_*", "release/mp_rank_*") for p in path.glob(pattern))


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the classes of torch.distributed.checkpoint and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" or (module, name) in {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"), ("builtins", "set"),
            *(("torch.distributed.checkpoint.planner", n)  # megatron-core keeps the plan that it saved by: plain records
              for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
        }:  # fmt: skip
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"{METADATA_FILE} asks for {module}.{name}, which checkpoint metadata has no use for; refused")


class TorchDistReader:
    """Parameters of a ``torch_dist`` directory under their canonical names, whatever layout wrote it.

    Raises:
        CheckpointError: not such a directory, or damaged.
    """

    def __init__(self, path: Path):
        self.directory = checkpoint_directory(path)
        config = self.directory / CONFIG_FILE
        backend = json.loads(config.read_text()).get("sharded_backend") if config.is_file() else None
        if backend not in (None, "torch_dist"):
            raise CheckpointError(f"{config} says sharded_backend {backend!r}; expected torch_dist: save it as that")
        file = self.directory / METADATA_FILE
        if not file.is_file():
            raise CheckpointError(f"{self.directory} has no {METADATA_FILE}; expected a torch_dist checkpoint")
        try:
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            tensors, self._storage = metadata.state_dict_metadata, metadata.storage_data
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{file} cannot be read: {error!r}") from error
        if getattr(metadata, "mcore_data", None):
            flat = [k for k, v in metadata.mcore_data.items() if v and k in tensors]
            if flat:
                raise CheckpointError(
                    f"{flat[0]} is stored in a reformulated layout in {file}; save it with torch_dist again"
                )
        self._tensors = {k: v for k, v in tensors.items() if isinstance(v, TensorStorageMetadata)}
        self._stored: dict[str, Stored] = {}

    def check(self, specs: Sequence[ParamSpec]) -> None:
        """Prove that the directory holds exactly the parameters of a model, whole, before any is read.

        ``specs`` have the vocabulary unpadded; files may pad it.

        Raises:
            CheckpointError: missing, unexpected, mis-shaped, mis-typed or truncated tensors, each by name.
        """
        problems, used = [], set()
        names = StoredNames(specs)
        for spec in specs:
            variants = names.readable(spec)
            found = [v for v in variants if v.name in self._tensors]
            if not found:
                problems.append(f"missing: {spec.name} (as {variants[0].name})")
                continue
            used |= {v.name for v in found if self._same(found[0], v)}
            name, index, extent = self._stored[spec.name] = found[0]
            meta, shape, right = self._tensors[name], tuple(self._tensors[name].size), (*extent, *spec.shape)
            fits = len(shape) == len(right) and all(
                a == b or (spec.valid_rows is not None and i == len(index) and a >= b)
                for i, (a, b) in enumerate(zip(shape, right))
            )
            if not fits:
                problems.append(f"{name}: shape {shape}, expected {tuple(right)}")
            elif not meta.properties.dtype.is_floating_point:
                problems.append(f"{name} has dtype {meta.properties.dtype}; expected floating-point weights")
        # optimiser states and bytes (_extra_state) lie beside the weights of a training checkpoint
        extra = [n for n in self._tensors if n not in used and not n.startswith("optimizer") and "_extra_state" not in n]
        problems += [f"unexpected: {name}" for name in sorted(extra)]
        problems += self._damaged(used)
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise CheckpointError(f"{self.directory} does not match its config.json: {shown}")

    def _damaged(self, used: set[str]) -> list[str]:
        out, covered = [], dict.fromkeys(used, 0)
        sizes: dict[str, int] = {}
        for index, info in self._storage.items():
            if index.fqn not in used:
                continue
            file = self.directory / info.relative_path
            if info.relative_path not in sizes:
                sizes[info.relative_path] = file.stat().st_size if file.is_file() else -1
            size = sizes[info.relative_path]
            if size < info.offset + info.length:
                what = (
                    "does not exist" if size < 0 else f"ends at byte {size}, expected at least {info.offset + info.length}"
                )
                out.append(f"{index.fqn}: {file.name} {what}")
            if getattr(info, "transform_descriptors", None):
                out.append(f"{index.fqn}: stored with {info.transform_descriptors}, expected plain tensors")
        for name in used:
            meta = self._tensors[name]
            covered[name] = sum(c.sizes.numel() for c in {(*c.offsets,): c for c in meta.chunks}.values())
            if covered[name] != meta.size.numel():
                out.append(f"{name}: its pieces hold {covered[name]} of {meta.size.numel()} values")
            out += [
                f"{name}: no data for the piece at {tuple(c.offsets)}" for c in meta.chunks
                if MetadataIndex(name, c.offsets) not in self._storage
            ]  # fmt: skip
        return out

    def stored(self) -> list[tuple[str, tuple[int, ...], torch.dtype, int]]:
        """(name, shape, dtype, pieces) of every tensor as it is in the files."""
        return [
            (name, tuple(meta.size), meta.properties.dtype, len(meta.chunks)) for name, meta in sorted(self._tensors.items())
        ]

    def _same(self, one: Stored, other: Stored) -> bool:
        """Whether two names stand for the same bytes, as written here; anything else is a tensor too many."""
        return one == other or one.front == other.front and all(
            (info := self._storage.get(MetadataIndex(other.name, chunk.offsets))) is not None
            and info == self._storage.get(MetadataIndex(one.name, chunk.offsets))
            for chunk in self._tensors[one.name].chunks
        )  # fmt: skip

    def dtype(self, spec: ParamSpec) -> torch.dtype:
        return self._tensors[self._stored[spec.name].name].properties.dtype

    def read(self, spec: ParamSpec) -> Tensor:
        """The whole parameter (``spec.shape``); vocabulary rows that the file has beyond it are left out.

        :meth:`check` comes first: it finds the tensors.
        """
        name, index, _ = self._stored[spec.name]
        meta, depth = self._tensors[name], len(index)
        out = torch.empty(spec.shape, dtype=meta.properties.dtype)  # its pages are not touched before they are filled
        for chunk in meta.chunks:
            front = list(zip(index, chunk.offsets, chunk.sizes))
            if not all(a <= i < a + n for i, a, n in front):
                continue
            start, size = list(chunk.offsets)[depth:], list(chunk.sizes)[depth:]
            kept = [min(a + n, limit) - a for a, n, limit in zip(start, size, spec.shape)]
            if min(kept) <= 0:
                continue
            value = self._load(MetadataIndex(name, chunk.offsets), tuple(chunk.sizes), meta.properties.dtype)
            value = value[tuple(i - a for i, a, _ in front)]
            if kept == list(spec.shape) == size and value.is_contiguous():
                out = value  # the whole parameter: a copy would be a second one in memory
                break
            target = out
            for axis, (a, n) in enumerate(zip(start, kept)):
                target, value = target.narrow(axis, a, n), value.narrow(axis, 0, n)
            target.copy_(value)
        if not all_finite(out):
            raise CheckpointError(f"{spec.name} holds NaN or infinite values in {self.directory} ({name})")
        return out

    def _load(self, index: MetadataIndex, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        info = self._storage[index]
        path = self.directory / info.relative_path
        try:
            with path.open("rb") as file:
                view = cast(Any, _create_file_view(file, info.offset, info.length))
                value = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{index.fqn} in {path} at byte {info.offset} cannot be read: {error}") from error
        found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        if found != (shape, dtype):
            raise CheckpointError(f"{index.fqn} in {path} at byte {info.offset}: found {found}, expected {(shape, dtype)}")
        return value
