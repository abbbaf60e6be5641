"""Hugging Face checkpoint -> the shard that one rank holds. Each rank reads only its own slices."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rl3d.io.finite import all_finite
from rl3d.io.fused import FusedReader
from rl3d.io.hf_reader import CheckpointError, HFReader, open_hf
from rl3d.io.random_reader import RandomReader, is_random
from rl3d.models import Architecture, MappedParameter, hf_shapes, mapped_parameters

Reader = HFReader | FusedReader | RandomReader
_BLOCK_BYTES = 32 << 20  # read at a time, so that a large tensor is not in memory twice


@torch.no_grad()
def import_hf(directory: str | Path, arch: Architecture, padded_vocab: int, tensors: Mapping[str, Tensor],
              tp_size: int, tp_rank: int, absent: Collection[str] = ()) -> None:  # fmt: skip
    """Fill ``tensors`` (canonical name -> local shard, in place) from a Hugging Face directory, or with random weights
    where the directory says so (:mod:`rl3d.io.random_reader`).

    Rows that pad the vocabulary become zeros. Parameters in ``absent`` are not in the directory and stay as they are.
    Reads about 1/tp of each tensor and nothing of other stages.

    Raises:
        CheckpointError: tensors missing, unexpected, mis-shaped or not finite, before or while reading, by name.
    """
    reader: HFReader | RandomReader
    if is_random(directory):
        reader = RandomReader(directory, next(iter(tensors.values())).device)
    else:
        reader = open_hf(directory)
    mapped = {m.spec.name: m for m in mapped_parameters(arch, padded_vocab)}
    fresh = {s.hf_name for name in absent if name in mapped for s in mapped[name].segments}
    expected = {name: shape for name, shape in hf_shapes(arch).items() if name not in fresh}
    # a tied checkpoint may repeat its embedding as a head; a value model takes the backbone of one that has a head
    reader.check(expected, tied_head="lm_head.weight" if arch.tied or arch.value_head else None)
    unknown = set(tensors) - set(mapped)
    if unknown:
        raise CheckpointError(f"the model has parameters that no rule maps: {sorted(unknown)}")
    for name, tensor in tensors.items():
        if name not in absent:
            read_shard(reader, mapped[name], tp_size, tp_rank, tensor)


def read_shard(reader: Reader, mapped: MappedParameter, tp_size: int, tp_rank: int, out: Tensor) -> None:
    """Read one rank's shard of one parameter into ``out`` (local shape)."""
    spec = mapped.spec
    if tuple(out.shape) != spec.local_shape(tp_size):
        raise CheckpointError(
            f"{spec.name}: the module's shard has shape {tuple(out.shape)}, the rules give {spec.local_shape(tp_size)}"
        )
    if spec.valid_rows is not None and spec.valid_rows < spec.shape[0]:
        out.zero_()
    if spec.dim == 0:
        for piece in spec.pieces(tp_size, tp_rank):
            for s in mapped.segments:
                start = max(piece.global_start, s.start)
                stop = min(piece.global_start + piece.length, s.start + s.length)
                if start < stop:
                    rows = (s.hf_start + start - s.start, s.hf_start + stop - s.start)
                    local = piece.local_start + start - piece.global_start
                    _copy(out[local : local + stop - start], reader, s.hf_name, rows)
        return
    for s in mapped.segments:
        target = out[s.start : s.start + s.length]
        if spec.dim is None:
            _copy(target, reader, s.hf_name, (s.hf_start, s.hf_start + s.length))
            continue
        for piece in spec.pieces(tp_size, tp_rank):
            columns = (piece.global_start, piece.global_start + piece.length)
            part = target[:, piece.local_start : piece.local_start + piece.length]
            _copy(part, reader, s.hf_name, (s.hf_start, s.hf_start + s.length), columns)


def _copy(target: Tensor, reader: Reader, name: str, rows: tuple[int, int],
          columns: tuple[int, int] | None = None) -> None:  # fmt: skip
    step = max(1, _BLOCK_BYTES // max(1, target[:1].numel() * 8))
    for start in range(0, rows[1] - rows[0], step):
        stop = min(start + step, rows[1] - rows[0])
        _copy_block(target[start:stop], reader.read(name, (rows[0] + start, rows[0] + stop), columns), reader, name)


def _copy_block(target: Tensor, value: Tensor, reader: Reader, name: str) -> None:
    if not value.is_floating_point():
        raise CheckpointError(f"{name} has dtype {value.dtype} in {reader.file(name)}; expected floating-point weights")
    if not all_finite(value):
        raise CheckpointError(f"{name} holds NaN or infinite values in {reader.file(name)}; the checkpoint is damaged")
    target.copy_(value)
    if target.dtype != value.dtype and not all_finite(target):
        raise CheckpointError(
            f"{name} in {reader.file(name)} holds values up to {float(value.abs().max()):.3g}, more than {target.dtype} "
            f"can hold; choose another dtype"
        )
