"""Hugging Face -> Megatron and back: plans out of the families' rules, and what is proved before a byte is written."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl3d.io import torch_dist
from rl3d.io.export_hf import safetensors_header
from rl3d.io.extents import Extent, Group, Record
from rl3d.io.hf_reader import INDEX_FILE, SINGLE_FILE
from rl3d.io.pages import use_huge_pages_here
from rl3d.io.placement import Placement, Region
from rl3d.io.source import DTYPES, HF_FOLDER, MANIFEST_FILE, Source
from rl3d.io.stored_names import StoredNames
from rl3d.io.stream import ConvertError, file_sizes, write_directory
from rl3d.models import MappedParameter, hf_shapes, mapped_parameters
from rl3d.reshard.fingerprint import fingerprint_tensor, fold

Show = Callable[[int, int, float], None]
_CHUNK = 1 << 20  # bytes that a fingerprint works on at a time: they stay in the cache


def hf_to_megatron(src: str | Path, dst: str | Path, *, dtype: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1,
                   vocab_multiple: int = 128, max_shard_size: int = 5_000_000_000, **options: Any,
                   ) -> dict[str, Any]:  # fmt: skip
    """Write ``dst``, a ``torch_dist`` checkpoint that megatron-core loads at any layout. Returns its manifest.

    Args:
        dtype: of the result; by default the source's.
        tp, pp, ep: cut into the files of the ranks of this layout, so that each rank of it reads little more than its own.
        vocab_multiple: the vocabulary is padded with zeros to a multiple (Megatron-LM's make_vocab_size_divisible_by).
        max_shard_size: bytes; a larger file is begun anew between parameters.
        options: ``jobs``, ``resume``, ``overwrite``, ``dry_run``, ``show`` (see :func:`write_directory`).

    Raises:
        CheckpointError, ConvertError, LayoutError, UnsupportedModelError: before anything is under the name ``dst``.
    """
    use_huge_pages_here()
    source = _source(src, "import", None, dtype)
    return _to_megatron(source, Path(dst), (tp, pp, ep), vocab_multiple, max_shard_size, options)


def reshard(src: str | Path, dst: str | Path, *, tp: int = 1, pp: int = 1, ep: int = 1, hf: str | Path | None = None,
            dtype: str | None = None, vocab_multiple: int = 128, max_shard_size: int = 5_000_000_000, **options: Any,
            ) -> dict[str, Any]:  # fmt: skip
    """Write the weights of a ``torch_dist`` checkpoint, or of one of an rl3d run, cut as the ranks of another layout would
    have saved them.

    Args, result and errors as :func:`hf_to_megatron` and :func:`megatron_to_hf`.
    """
    use_huge_pages_here()
    source = _source(src, "reshard", hf, dtype)
    return _to_megatron(source, Path(dst), (tp, pp, ep), vocab_multiple, max_shard_size, options)


def _to_megatron(source: Source, dst: Path, layout: tuple[int, int, int], vocab_multiple: int, max_shard_size: int,
                 options: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    arch = source.arch
    placement = Placement(arch.num_layers, *layout, experts=arch.num_experts)
    padded = mapped_parameters(arch, arch.padded_vocab(layout[0], multiple=vocab_multiple))
    files = _FileNames(max_shard_size)
    lengths: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    names = StoredNames([m.spec for m in padded])

    def group(mapped: MappedParameter) -> tuple[Group, list[Region]]:
        spec, kind, extents = mapped.spec, source.dtype_of(mapped), []
        regions, front = placement.regions(spec), (1,) * len(names.written(spec)[0].front)
        for region in regions:
            key = (*front, *region.sizes), kind
            if key not in lengths:
                lengths[key] = torch_dist.encoded_size(*key)
            extents.append(Extent(files.take(region.rank, lengths[key]), lengths[key]))

        def make() -> tuple[list[Any], dict[str, Any]]:
            value = source.read(mapped)
            stacked = value.view(*front, *spec.shape)
            return [partial(_write_region, stacked, r) for r in regions], _facts(mapped, value)

        return Group(spec.name, tuple(extents), make), regions

    pairs = [group(m) for m in padded]

    def finish(directory: Path, records: list[Record]) -> dict[str, Any]:
        places = {
            g.name: [torch_dist.Place(r.offsets, r.sizes, w.file, w.offset, w.length)
                     for r, w in zip(regions, record.written, strict=True)]
            for (g, regions), record in zip(pairs, records, strict=True)
        }  # fmt: skip
        dtypes = {m.spec.name: source.dtype_of(m) for m in padded}
        torch_dist.write_metadata(directory, [m.spec for m in padded], dtypes, places)
        source.copy_sidecars(directory / HF_FOLDER)
        return {"format": "torch_dist", "padded_vocab": padded[0].spec.shape[0]}

    settings = {"vocab_multiple": vocab_multiple, "layout": str(placement)}
    return _write(source, dst, settings, [g for g, _ in pairs], {}, finish, options)


def megatron_to_hf(src: str | Path, dst: str | Path, *, hf: str | Path | None = None, dtype: str | None = None,
                   max_shard_size: int = 5_000_000_000, **options: Any) -> dict[str, Any]:  # fmt: skip
    """Write ``dst``, a Hugging Face directory: no pad rows, no tied head. Returns its manifest.

    Args and errors as :func:`hf_to_megatron`; ``hf`` is a directory with the configuration and the tokenizer, for a
    Megatron checkpoint that was not converted here. PyTorch ``.bin`` files, GGUF files and checkpoints of rl3d runs are
    sources as well.
    """
    use_huge_pages_here()
    source = _source(src, "export", hf, dtype)
    shapes = hf_shapes(source.arch)
    files = _FileNames(max_shard_size)
    held: dict[int, dict[str, tuple[int, ...]]] = {}  # number of the file -> its tensors
    dtypes: dict[str, torch.dtype] = {}

    def group(mapped: MappedParameter) -> tuple[int, int, MappedParameter]:
        kind = source.dtype_of(mapped)
        size = mapped.spec.numel * kind.itemsize
        number = files.number(0, size)
        for name in hf_names(mapped):
            held.setdefault(number, {})[name] = shapes[name]
            dtypes[name] = kind
        return number, size, mapped

    planned = [group(m) for m in source.parameters]
    names = {n: SINGLE_FILE if len(held) == 1 else f"model-{n + 1:05d}-of-{len(held):05d}.safetensors" for n in held}
    weight_map = {tensor: names[n] for n, tensors in held.items() for tensor in tensors}
    if set(weight_map) != set(shapes):
        raise ConvertError(f"the rules leave out {sorted(set(shapes) - set(weight_map))}")

    def make(mapped: MappedParameter) -> tuple[list[Any], dict[str, Any]]:
        value = source.read(mapped)
        return [partial(_write_tensors, mapped, value)], _facts(mapped, value)

    groups = [Group(m.spec.name, (Extent(names[n], size),), partial(make, m)) for n, size, m in planned]
    headers = {names[n]: safetensors_header(tensors, dtypes) for n, tensors in held.items()}

    def finish(directory: Path, records: list[Record]) -> dict[str, Any]:
        if len(held) > 1:
            total = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        source.copy_sidecars(directory)
        return {"format": "hf"}

    return _write(source, Path(dst), {}, groups, headers, finish, options)


def parse_size(text: str) -> int:
    """``5GB``, ``500MB`` or plain bytes -> bytes. Raises :class:`ConvertError` for anything else."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1, "": 1}
    digits = text.upper().rstrip("BGKMT")
    unit = text.upper()[len(digits) :]
    if not digits.isdigit() or int(digits) < 1 or unit not in units:
        raise ConvertError(f"{text!r} is not a size; expected for example 5GB or 500MB")
    return int(digits) * units[unit]


def hf_names(mapped: MappedParameter) -> list[str]:
    """Hugging Face tensors that the parameter is made of, in the order of their first rows."""
    return list(dict.fromkeys(s.hf_name for s in mapped.segments))


class _FileNames:
    """Files of each rank, another begun where one would grow beyond the limit."""

    def __init__(self, limit: int):
        self._limit = limit
        self._files: dict[int, tuple[int, int]] = {}  # rank -> (number, bytes)

    def number(self, rank: int, length: int) -> int:
        """Number of the rank's file that the next ``length`` bytes go into."""
        number, size = self._files.get(rank, (0, 0))
        if size and size + length > self._limit:
            number, size = number + 1, 0
        self._files[rank] = number, size + length
        return number

    def take(self, rank: int, length: int) -> str:
        """The same as torch.distributed.checkpoint names files."""
        return f"__{rank}_{self.number(rank, length)}.distcp"


def _write_region(value: Tensor, region: Region, write: Callable[[Any], Any]) -> None:
    """``value`` may have dimensions of one in front of the region's."""
    front = value.ndim - len(region.sizes)
    for axis, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        value = value.narrow(front + axis, start, size)
    torch_dist.encode(value, write)


def _write_tensors(mapped: MappedParameter, value: Tensor, write: Callable[[Any], Any]) -> None:
    for _, tensor in _hf_tensors(mapped, value):
        write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _hf_tensors(mapped: MappedParameter, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name in hf_names(mapped):
        segments = sorted((s for s in mapped.segments if s.hf_name == name), key=lambda s: s.hf_start)
        parts = [value[s.start : s.start + s.length] for s in segments]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def _facts(mapped: MappedParameter, value: Tensor) -> dict[str, Any]:
    return {"fingerprint": f"{fingerprint_tensor(value, mapped.spec.valid_rows, _CHUNK):016x}"}


_SOURCES = {"import": ("hf", "bin", "gguf", "random", "rl3d"), "export": ("torch_dist", "bin", "gguf", "random", "rl3d"),
            "reshard": ("torch_dist", "rl3d")}  # fmt: skip


def _source(path: str | Path, work: str, hf: str | Path | None, dtype: str | None) -> Source:
    if dtype is not None and dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    source = Source(path, hf, DTYPES[dtype] if dtype else None)
    if source.kind not in _SOURCES[work]:
        other = next(w for w, kinds in _SOURCES.items() if source.kind in kinds)
        raise ConvertError(
            f"{path} is a checkpoint of format {source.kind}, expected {' or '.join(_SOURCES[work])}; did you mean "
            f"`{other}`?"
        )
    return source


def _write(source: Source, dst: Path, settings: dict[str, Any], groups: Sequence[Group], headers: dict[str, bytes],
           finish: Callable[[Path, list[Record]], dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    if dst.resolve() in (source.path.resolve(), source.weights.resolve()):
        raise ConvertError(f"{dst} is the source itself; choose another name")
    head = {
        "family": source.arch.family, "source": str(source.path), "dtype": str(source.dtype).removeprefix("torch."),
        **settings,
    }  # fmt: skip
    sizes = file_sizes(groups, headers)
    if options.pop("dry_run", False):
        return {**head, "files": sizes, "bytes": sum(sizes.values())}
    identity = {**head, "torch": torch.__version__, "files": sizes, "read": source.stat()}
    out: dict[str, Any] = {}

    def complete(directory: Path, records: list[Record]) -> None:
        prints = {r.name: int(r.facts["fingerprint"], 16) for r in records}
        out.update(head, **finish(directory, records), fingerprint=fold(prints), bytes=sum(sizes.values()))
        out["items"] = [
            {"name": r.name, "file": w.file, "offset": w.offset, "length": w.length, "sha256": w.sha256, **r.facts}
            for r in records for w in r.written
        ]  # fmt: skip
        (directory / MANIFEST_FILE).write_text(json.dumps(out, indent=1) + "\n")

    write_directory(dst, identity, groups, headers, complete, **options)
    return out
