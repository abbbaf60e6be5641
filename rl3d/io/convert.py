"""Hugging Face -> Megatron and back: plans out of the families' rules, and what is proved before a byte is written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl3d.io import torch_dist
from rl3d.io.export_hf import safetensors_header
from rl3d.io.hf_reader import INDEX_FILE, SINGLE_FILE
from rl3d.io.source import DTYPES, HF_FOLDER, MANIFEST_FILE, Source
from rl3d.io.stream import ConvertError, Group, OutputFile, Record, write_directory
from rl3d.models import MappedParameter, hf_shapes, mapped_parameters
from rl3d.reshard.fingerprint import fingerprint_tensor, fold

Show = Callable[[int, int, float], None]
_CHUNK = 16 << 20


def hf_to_megatron(src: str | Path, dst: str | Path, *, dtype: str | None = None, vocab_multiple: int = 128,
                   max_shard_size: int = 5_000_000_000, **options: Any) -> dict[str, Any]:  # fmt: skip
    """Write ``dst``, a ``torch_dist`` checkpoint that megatron-core loads at any layout. Returns its manifest.

    Args:
        dtype: of the result; by default the source's.
        vocab_multiple: the vocabulary is padded with zeros to a multiple (Megatron-LM's make_vocab_size_divisible_by).
        max_shard_size: bytes; a larger file is begun anew between parameters.
        options: ``jobs``, ``resume``, ``overwrite``, ``dry_run``, ``show`` (see :func:`write_directory`).

    Raises:
        CheckpointError, ConvertError, UnsupportedModelError: before anything is under the name ``dst``.
    """
    source = _source(src, "hf", None, dtype)
    arch = source.arch
    padded = mapped_parameters(arch, arch.padded_vocab(multiple=vocab_multiple))

    def group(mapped: MappedParameter) -> Group:
        def make() -> tuple[Iterator[memoryview], dict[str, Any]]:
            value = source.read(mapped)
            return torch_dist.encode(mapped.spec, value), _facts(mapped, value)

        return Group(mapped.spec.name, mapped.spec.numel * source.dtype.itemsize, make)

    batches = _packed([group(m) for m in padded], max_shard_size)
    files = [OutputFile(f"__{i}_0.distcp", batch) for i, batch in enumerate(batches)]

    def finish(directory: Path, records: list[Record]) -> dict[str, Any]:
        places = {r.name: (r.file, r.offset, r.length) for r in records}
        specs = [m.spec for m in padded]
        torch_dist.write_metadata(directory, specs, dict.fromkeys(places, source.dtype), places, arch.num_layers)
        source.copy_sidecars(directory / HF_FOLDER, source.dtype)
        return {"format": "torch_dist", "padded_vocab": padded[0].spec.shape[0]}

    return _write(source, Path(dst), {"vocab_multiple": vocab_multiple}, files, finish, options)


def megatron_to_hf(src: str | Path, dst: str | Path, *, hf: str | Path | None = None, dtype: str | None = None,
                   max_shard_size: int = 5_000_000_000, **options: Any) -> dict[str, Any]:  # fmt: skip
    """Write ``dst``, a Hugging Face directory: no pad rows, no tied head. Returns its manifest.

    Args and errors as :func:`hf_to_megatron`; ``hf`` is a directory with the configuration and the tokenizer, for a
    Megatron checkpoint that was not converted here.
    """
    source = _source(src, "torch_dist", hf, dtype)
    shapes = hf_shapes(source.arch)

    def group(mapped: MappedParameter) -> Group:
        def make() -> tuple[Iterator[Any], dict[str, Any]]:
            value = source.read(mapped)
            return (_raw(part) for _, part in _hf_tensors(mapped, value)), _facts(mapped, value)

        return Group(mapped.spec.name, mapped.spec.numel * source.dtype.itemsize, make)

    by_name = {m.spec.name: m for m in source.parameters}
    batches = _packed([group(m) for m in source.parameters], max_shard_size)
    files, weight_map = [], {}
    for i, batch in enumerate(batches):
        name = SINGLE_FILE if len(batches) == 1 else f"model-{i + 1:05d}-of-{len(batches):05d}.safetensors"
        tensors = {n: shapes[n] for g in batch for n in hf_names(by_name[g.name])}
        weight_map.update(dict.fromkeys(tensors, name))
        files.append(OutputFile(name, batch, safetensors_header(tensors, source.dtype)))
    if set(weight_map) != set(shapes):
        raise ConvertError(f"the rules leave out {sorted(set(shapes) - set(weight_map))}")

    def finish(directory: Path, records: list[Record]) -> dict[str, Any]:
        if len(batches) > 1:
            total = sum(torch.Size(shape).numel() for shape in shapes.values()) * source.dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        source.copy_sidecars(directory, source.dtype)
        return {"format": "hf"}

    return _write(source, Path(dst), {}, files, finish, options)


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


def _hf_tensors(mapped: MappedParameter, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name in hf_names(mapped):
        segments = sorted((s for s in mapped.segments if s.hf_name == name), key=lambda s: s.hf_start)
        parts = [value[s.start : s.start + s.length] for s in segments]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def _raw(value: Tensor) -> Any:
    return value.contiguous().view(-1).view(torch.uint8).numpy().data


def _facts(mapped: MappedParameter, value: Tensor) -> dict[str, Any]:
    return {"fingerprint": f"{fingerprint_tensor(value, mapped.spec.valid_rows, _CHUNK):016x}"}


def _source(path: str | Path, kind: str, hf: str | Path | None, dtype: str | None) -> Source:
    if dtype is not None and dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    source = Source(path, hf, DTYPES[dtype] if dtype else None)
    if source.kind != kind:
        other = "export" if kind == "hf" else "import"
        raise ConvertError(f"{path} is a checkpoint of format {source.kind}, expected {kind}; did you mean `{other}`?")
    return source


def _packed(groups: list[Group], limit: int) -> list[list[Group]]:
    out: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        if out[-1] and size + group.size > limit:
            out.append([])
            size = 0
        out[-1].append(group)
        size += group.size
    return out


def _write(source: Source, dst: Path, settings: dict[str, Any], files: list[OutputFile],
           finish: Callable[[Path, list[Record]], dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    if dst.resolve() in (source.path.resolve(), source.weights.resolve()):
        raise ConvertError(f"{dst} is the source itself; choose another name")
    head = {
        "family": source.arch.family, "source": str(source.path), "dtype": str(source.dtype).removeprefix("torch."),
        **settings,
    }  # fmt: skip
    if options.pop("dry_run", False):
        return {**head, "files": {f.name: f.size for f in files}, "bytes": sum(f.size for f in files)}
    identity = {**head, "torch": torch.__version__, "files": [[f.name, [g.name for g in f.groups]] for f in files],
                "read": source.stat()}  # fmt: skip
    out: dict[str, Any] = {}

    def complete(directory: Path, records: list[Record]) -> None:
        prints = {r.name: int(r.facts["fingerprint"], 16) for r in records}
        out.update(head, **finish(directory, records), fingerprint=fold(prints), bytes=sum(r.length for r in records))
        out["items"] = [
            {"name": r.name, "file": r.file, "offset": r.offset, "length": r.length, "sha256": r.sha256, **r.facts}
            for r in records
        ]
        (directory / MANIFEST_FILE).write_text(json.dumps(out, indent=1) + "\n")

    write_directory(dst, identity, files, complete, **options)
    return out
