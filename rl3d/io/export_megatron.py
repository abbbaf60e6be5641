"""Sharded model -> ``torch_dist`` directory: each rank writes the shards that it holds, and no tensor is ever whole."""

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.io import torch_dist
from rl3d.io.export_hf import join_flat, write_sidecars, written_elsewhere
from rl3d.io.finite import all_finite
from rl3d.io.hf_reader import CheckpointError
from rl3d.io.source import HF_FOLDER, MANIFEST_FILE
from rl3d.io.stored_names import StoredNames
from rl3d.io.stream import partial_directory
from rl3d.layout import ParamSpec
from rl3d.layout.shards import tp_holdings
from rl3d.models import Architecture, mapped_parameters
from rl3d.reshard.fingerprint import combine, fingerprint_boxes, fold


@torch.no_grad()
def export_megatron(directory: str | Path, source: str | Path, arch: Architecture, padded_vocab: int,
                    tensors: Mapping[str, Tensor], groups: Any, dtype: torch.dtype | None = None,
                    flat_shards: bool = False) -> None:  # fmt: skip
    """Write a directory that megatron-core loads at any layout, and ``rl3d convert`` reads. Collective over the model's
    groups; data-parallel rank 0 writes.

    Args as :func:`~rl3d.io.export_hf.export_hf`. The directory appears when it is complete, in place of an older one.

    Raises:
        CheckpointError: on every rank of the writing replica, when any of them fails; nothing is left then.
    """
    final = Path(directory)
    partial = partial_directory(final)
    dtype = dtype or next(iter(tensors.values())).dtype
    mapped = mapped_parameters(arch, padded_vocab)
    first = groups.dp_rank == 0 and groups.tp_rank == 0 and groups.is_first_stage
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=groups.mp)
    mine = _Shards(partial, [m.spec for m in mapped], groups, dtype)
    for spec in (m.spec for m in mapped if m.spec.name in tensors and not written_elsewhere(m, groups)):
        shard: Tensor | None = tensors[spec.name].detach()
        if flat_shards:  # collective, so an error must not leave this loop
            shard = join_flat(tensors[spec.name], spec.local_shape(groups.tp_size), groups)
        if groups.dp_rank == 0 and shard is not None:
            mine.write(spec, shard)
    if groups.dp_rank == 0:
        written = (mine.close(), mine.items, mine.prints)
        _finish(final, partial, first, written, Path(source), arch, [m.spec for m in mapped], groups, dtype)
    dist.barrier(group=groups.mp)


class _Shards:
    """The file of one rank. The first error is kept for all ranks to see, and nothing is written after it.

    Attributes:
        items: every piece written: parameter, file, offset, length, SHA-256; ``at`` and ``size`` in the parameter.
        prints: fingerprint of what this rank holds of each parameter, where it is in it; those of all ranks add up.
    """

    def __init__(self, partial: Path, specs: list[ParamSpec], groups: Any, dtype: torch.dtype):
        self._names = StoredNames(specs)
        self.items: list[dict[str, Any]] = []
        self.prints: dict[str, int] = {}
        self._error, self._groups, self._dtype = "", groups, dtype
        self._path = partial / f"__{groups.pp_rank * groups.tp_size + groups.tp_rank}_0.distcp"
        self._file: BinaryIO | None = None

    def write(self, spec: ParamSpec, shard: Tensor) -> None:
        """Append the pieces of a shard; of a replicated parameter tensor-parallel rank 0's."""
        tp, rank = self._groups.tp_size, self._groups.tp_rank
        if self._error or (spec.dim is None and rank):
            return
        try:
            self._file = self._file or self._path.open("wb")
            # a copy: what numpy has looked at, torch never resizes again, and a switch may empty the weights' storage
            shard = shard.to("cpu", self._dtype, copy=True).contiguous()
            if not all_finite(shard):
                raise CheckpointError(f"{spec.name} holds NaN or infinite values on tensor-parallel rank {rank}")
            for piece in spec.pieces(tp, rank) or (None,):
                offsets, value = [0] * len(spec.shape), shard
                if piece is not None and spec.dim is not None:
                    offsets[spec.dim] = piece.global_start
                    value = shard.narrow(spec.dim, piece.local_start, piece.length)
                self.items.append({**self._append(self._file, spec, value), "at": offsets, "size": list(value.shape)})
            self.prints[spec.name] = int(fingerprint_boxes(shard, tp_holdings(spec, tp, rank)[0], 1 << 20))
        except (CheckpointError, OSError) as error:
            self._error = str(error)

    def _append(self, file: BinaryIO, spec: ParamSpec, value: Tensor) -> dict[str, Any]:
        start, digest = file.tell(), sha256()

        def write(block: Any) -> None:
            digest.update(block)
            file.write(block)

        front = (1,) * len(self._names.written(spec)[0].front)
        torch_dist.encode(value.reshape(*front, *value.shape), write)
        return {"name": spec.name, "file": self._path.name, "offset": start, "length": file.tell() - start,
                "sha256": digest.hexdigest()}  # fmt: skip

    def close(self) -> str:
        """Flush to disk; what went wrong, or nothing."""
        if self._file is not None:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        return self._error


def _finish(final: Path, partial: Path, first: bool, mine: tuple[str, list[dict[str, Any]], dict[str, int]], source: Path,
            arch: Architecture, specs: list[ParamSpec], groups: Any, dtype: torch.dtype) -> None:  # fmt: skip
    """Metadata and sidecars of what all ranks wrote, then the final name; or the first error, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size(groups.mp)
    dist.all_gather_object(everyone, mine, group=groups.mp)
    errors = [error for error, _, _ in everyone if error]
    if errors:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{final} was not written: {errors[0]}")
    if not first:
        return
    items = [item for _, written, _ in everyone for item in written]
    prints = combine(shares for _, _, shares in everyone)
    places: dict[str, list[torch_dist.Place]] = {spec.name: [] for spec in specs}
    for item in items:
        at, size = tuple(item.pop("at")), tuple(item.pop("size"))
        places[item["name"]].append(torch_dist.Place(at, size, item["file"], item["offset"], item["length"]))
        item["fingerprint"] = f"{prints[item['name']]:016x}"
    torch_dist.write_metadata(partial, specs, dict.fromkeys(places, dtype), places)
    (partial / HF_FOLDER).mkdir()
    write_sidecars(partial / HF_FOLDER, source, arch, dtype)
    record = {
        "family": arch.family, "source": str(source), "dtype": str(dtype).removeprefix("torch."), "format": "torch_dist",
        "layout": f"tp{groups.tp_size}.pp{groups.pp_size}", "fingerprint": fold(prints), "items": items,
    }  # fmt: skip
    (partial / MANIFEST_FILE).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
