"""Sharded model -> Hugging Face directory. One tensor at a time is whole, on one rank, and nothing more.

Each pipeline stage writes a safetensors file of its own: its tensor-parallel rank 0 gathers a parameter from its group,
turns its rows into Hugging Face tensors and appends them. The header is known before any value, so files are streamed.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.io.hf_reader import INDEX_FILE, SINGLE_FILE
from rl3d.layout import stage_layers
from rl3d.models import Architecture, MappedParameter, hf_shapes, mapped_parameters
from rl3d.models.value import classifier_config

_DTYPE_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# carried byte for byte from the directory that the model came from
SIDECARS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
TEMPLATES_FOLDER = "additional_chat_templates"  # where transformers keeps chat templates beyond the first


def safetensors_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | Mapping[str, torch.dtype]) -> bytes:
    """What precedes the values of a safetensors file that holds these tensors in this order (``dtype``: one, or by name)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        kind = dtype if isinstance(dtype, torch.dtype) else dtype[name]
        size = torch.Size(shape).numel() * kind.itemsize
        header[name] = {"dtype": _DTYPE_CODES[kind], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


class SafetensorsStream:
    """Writes a safetensors file tensor by tensor, in the order announced; finished by an atomic rename.

    Args:
        path: final name; a temporary name beside it is used until :meth:`close`.
        shapes: names and shapes in writing order. All tensors have ``dtype``.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype):
        self._path, self._partial = path, path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._pending = list(shapes.items())
        self._dtype = dtype
        self._file = self._partial.open("wb")
        self._file.write(safetensors_header(shapes, dtype))

    def write(self, name: str, value: Tensor) -> None:
        """Append the next tensor. Raises :class:`ValueError` when it is not the one announced."""
        expected_name, shape = self._pending.pop(0)
        if name != expected_name or tuple(value.shape) != tuple(shape) or value.dtype != self._dtype:
            raise ValueError(
                f"{self._path.name}: got {name} {tuple(value.shape)} {value.dtype}, expected {expected_name} "
                f"{tuple(shape)} {self._dtype}"
            )
        # a copy: what numpy has looked at, torch never resizes again, and a switch may empty the weights' storage
        self._file.write(value.to("cpu", copy=True).contiguous().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Check that everything was written, flush to disk and give the file its final name."""
        if self._pending:
            raise ValueError(f"{self._path.name}: {len(self._pending)} tensors were never written: {self._pending[0][0]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


@torch.no_grad()
def export_hf(directory: str | Path, source: str | Path, arch: Architecture, padded_vocab: int,
              tensors: Mapping[str, Tensor], groups: Any, dtype: torch.dtype | None = None,
              flat_shards: bool = False) -> None:  # fmt: skip
    """Write a directory that ``transformers`` loads. Collective over the model's groups.

    Args:
        directory: where to; files appear under their final names only when complete.
        source: the Hugging Face directory that the model came from (config.json, tokenizer and templates).
        tensors: canonical name -> this rank's shard.
        groups: the :class:`~rl3d.distributed.groups.ModelGroups` that the shards live in.
        dtype: dtype of the files; by default the shards' own.
        flat_shards: ``tensors`` are flat data-parallel parts of the shards, as ZeRO stage 3 leaves them.

    Only data-parallel rank 0 writes. Pad rows of the vocabulary are left out, a tied head is not written.
    """
    directory = Path(directory)
    mapped = {m.spec.name: m for m in mapped_parameters(arch, padded_vocab)}
    # the tied embedding lives on the first and the last stage: the first one writes it
    mine = [m for name, m in mapped.items() if name in tensors and not written_elsewhere(m, groups)]
    dtype = dtype or next(iter(tensors.values())).dtype
    if groups.dp_rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    if groups.dp_rank == 0 or flat_shards:
        _write_stage(directory, arch, mine, tensors, groups, dtype, flat_shards)
    dist.barrier(group=groups.mp)
    if groups.dp_rank == 0 and groups.tp_rank == 0 and groups.is_first_stage:
        _write_index(directory, arch, padded_vocab, groups, dtype)
        write_sidecars(directory, Path(source), arch, dtype)
    dist.barrier(group=groups.mp)


def written_elsewhere(mapped: MappedParameter, groups: Any) -> bool:
    return mapped.spec.place == "pre+post" and not groups.is_first_stage


def _stage_file(stage: int, stages: int) -> str:
    return SINGLE_FILE if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _hf_names(mapped: MappedParameter) -> list[str]:
    return list(dict.fromkeys(s.hf_name for s in mapped.segments))


def hf_tensors(mapped: MappedParameter, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that one whole parameter (padded shape) is made of, pad rows left out."""
    for name in _hf_names(mapped):
        segments = sorted((s for s in mapped.segments if s.hf_name == name), key=lambda s: s.hf_start)
        parts = [whole[s.start : s.start + s.length] for s in segments]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def _write_stage(directory: Path, arch: Architecture, mine: list[MappedParameter], tensors: Mapping[str, Tensor],
                 groups: Any, dtype: torch.dtype, flat_shards: bool) -> None:  # fmt: skip
    shapes = hf_shapes(arch)
    stream = None
    if groups.tp_rank == 0 and groups.dp_rank == 0:
        names = [name for m in mine for name in _hf_names(m)]
        path = directory / _stage_file(groups.pp_rank, groups.pp_size)
        stream = SafetensorsStream(path, {name: shapes[name] for name in names}, dtype)
    try:
        for m in mine:
            shard = tensors[m.spec.name]
            if flat_shards:
                joined = join_flat(shard, m.spec.local_shape(groups.tp_size), groups)
                if joined is None:
                    continue
                shard = joined
            whole = gather_parameter(m, shard, groups)
            if stream is None or whole is None:
                continue
            for name, value in hf_tensors(m, whole):
                stream.write(name, value.to(dtype))
    except BaseException:
        if stream is not None:
            stream.abort()
        raise
    if stream is not None:
        stream.close()


def join_flat(part: Tensor, shape: tuple[int, ...], groups: Any) -> Tensor | None:
    """A tensor-parallel shard from its flat parts, on data-parallel rank 0, ``None`` elsewhere. Collective over dp."""
    part = part.detach().contiguous()
    first = dist.get_process_group_ranks(groups.dp)[0]
    parts = [torch.empty_like(part) for _ in range(groups.dp_size)] if groups.dp_rank == 0 else None
    dist.gather(part, parts, dst=first, group=groups.dp)
    return None if parts is None else torch.cat(parts)[: torch.Size(shape).numel()].view(shape)


def gather_parameter(mapped: MappedParameter, shard: Tensor, groups: Any) -> Tensor | None:
    """One whole parameter (padded shape) on tensor-parallel rank 0, ``None`` elsewhere. Collective over ``groups.tp``."""
    spec, shard = mapped.spec, shard.detach()
    if spec.dim is None or groups.tp_size == 1:
        return shard if groups.tp_rank == 0 else None
    shard = shard.contiguous()
    first = dist.get_process_group_ranks(groups.tp)[0]
    parts = [torch.empty_like(shard) for _ in range(groups.tp_size)] if groups.tp_rank == 0 else None
    dist.gather(shard, parts, dst=first, group=groups.tp)
    if parts is None:
        return None
    whole = torch.empty(spec.shape, dtype=shard.dtype, device=shard.device)
    for index, part in enumerate(parts):
        for piece in spec.pieces(groups.tp_size, index):
            source = part.narrow(spec.dim, piece.local_start, piece.length)
            whole.narrow(spec.dim, piece.global_start, piece.length).copy_(source)
    return whole


def _write_index(directory: Path, arch: Architecture, padded_vocab: int, groups: Any, dtype: torch.dtype) -> None:
    index = directory / INDEX_FILE
    written = {_stage_file(stage, groups.pp_size) for stage in range(groups.pp_size)}
    for stale in directory.glob("model*.safetensors"):  # of an earlier export with another number of stages
        if stale.name not in written:
            stale.unlink()
    if groups.pp_size == 1:
        index.unlink(missing_ok=True)
        return
    layers = stage_layers(arch.num_layers, groups.pp_size, groups.vpp)
    weight_map, shapes, total = {}, hf_shapes(arch), 0
    for m in mapped_parameters(arch, padded_vocab):
        stage = next(s for s in range(groups.pp_size) if m.spec.on_stage(s, layers))
        for name in _hf_names(m):
            weight_map[name] = _stage_file(stage, groups.pp_size)
            total += torch.Size(shapes[name]).numel() * dtype.itemsize
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    _write_atomically(index, text + "\n")


def write_sidecars(directory: Path, source: Path, arch: Architecture, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text())
    config["vocab_size"] = arch.vocab_size
    config.pop("torch_dtype", None)
    if arch.value_head:
        config = classifier_config(config, arch)
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_atomically(directory / "config.json", json.dumps(config, indent=2) + "\n")
    if source.resolve() == directory.resolve():
        return
    for name in SIDECARS:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATES_FOLDER, directory / TEMPLATES_FOLDER, dirs_exist_ok=True)


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
