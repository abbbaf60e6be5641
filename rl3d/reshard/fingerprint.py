"""Fingerprints that follow weights through every layout.

The fingerprint of a parameter is ``sum over (r, c) of a(r) * b(c) * bits(r, c)  modulo 2**64``: ``bits`` is the
element's bit pattern at its declared dtype read as a signed integer, ``(r, c)`` its position in the global matrix, and
``a``, ``b`` are odd numbers from two SplitMix64 streams (Steele, Lea and Flood, OOPSLA 2014). The product is a hash of
the global position that needs one multiplication per element; being a sum, shards add up whatever the sharding, and
integers wrap alike on CPU and GPU. A changed element always changes it; exchanged rows, columns, blocks or a
transposition change it except with a probability around 2**-60.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from hashlib import sha256

import torch
import torch.distributed as dist

from rl3d.layout import Box, Holding, ParamSpec, ShardLayout, matrix_shape

CHUNK_BYTES = 64 << 20
_KEEP = 1 << 20
_MODULUS = 1 << 64
_ROW_SEED, _COLUMN_SEED = 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Mapping[str, torch.Tensor]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= _MODULUS
    return value - _MODULUS if value >= 1 << 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's shift of int64 drags the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _odd_numbers(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers for positions ``start`` ... ``start + count - 1``."""
    x = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    x = x * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


class _Weights:
    """The streams ``a`` and ``b`` on one device; beginnings are kept, since all parameters use the same ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, seed: int, start: int, count: int) -> torch.Tensor:
        end = start + count
        if end > _KEEP:
            return _odd_numbers(seed, start, count, self.device)
        kept = self._kept.get(seed)
        if kept is None or len(kept) < end:
            kept = self._kept[seed] = _odd_numbers(seed, 0, max(4096, 1 << (end - 1).bit_length()), self.device)
        return kept[start:end]


@torch.no_grad()
def fingerprint_boxes(
    tensor: torch.Tensor, holdings: Iterable[Holding], chunk_bytes: int = CHUNK_BYTES, weights: _Weights | None = None
) -> torch.Tensor:
    """Sum over the given boxes of a contiguous local tensor: an int64 scalar on its device.

    Temporary memory stays below ``chunk_bytes`` and a few MB for the weights.
    """
    weights = weights or _Weights(tensor.device)
    flat = tensor.detach().contiguous().view(-1).view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    limit = max(1, chunk_bytes // 16)
    for box, offset, pitch in holdings:
        width = min(box.cols, limit)
        height = max(1, limit // width)
        for left in range(0, box.cols, width):
            cols = min(width, box.cols - left)
            b = weights.get(_COLUMN_SEED, box.col + left, cols)
            for top in range(0, box.rows, height):
                rows = min(height, box.rows - top)
                start = flat.storage_offset() + offset + top * pitch + left
                bits = flat.as_strided((rows, cols), (pitch, 1), start).to(torch.int64, copy=True)
                a = weights.get(_ROW_SEED, box.row + top, rows)
                total += (bits.mul_(b).sum(1) * a).sum()
    return total


def fingerprint_tensor(tensor: torch.Tensor, valid_rows: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Fingerprint of a whole parameter in canonical (Megatron, TP = 1) form, padding rows left out.

    The dtype is part of it: convert to the declared dtype first when comparing with a file of another one.
    """
    rows, cols = matrix_shape(tensor.shape)
    rows = rows if valid_rows is None else min(rows, valid_rows)
    return int(fingerprint_boxes(tensor, [Holding(Box(0, 0, rows, cols), 0, cols)], chunk_bytes)) % _MODULUS


def local_fingerprints(
    specs: Sequence[ParamSpec], layout: ShardLayout, rank: int, tensors: Tensors, chunk_bytes: int = CHUNK_BYTES
) -> dict[str, int]:
    """This rank's share: atoms of which it is the lowest holder. Shares of all ranks add up; see :func:`combine`.

    Raises KeyError naming the rank and the parameter when a tensor is missing.
    """
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    values = _local(specs, layout, rank, tensors, chunk_bytes, device)
    return dict(zip([s.name for s in specs], values.tolist(), strict=True))


def combine(shares: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the shares of all ranks: name -> fingerprint in 0 ... 2**64 - 1."""
    total: dict[str, int] = {}
    for share in shares:
        for name, value in share.items():
            total[name] = (total.get(name, 0) + value) % _MODULUS
    return total


def fingerprint_shards(
    specs: Sequence[ParamSpec],
    layout: ShardLayout,
    rank: int,
    tensors: Tensors,
    group: "dist.ProcessGroup | None" = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, int]:
    """Fingerprint of every global parameter, replicas counted once. Collective over ``group``.

    Args:
        specs: the model's parameters.
        layout: layout of ``tensors``; a rank that holds nothing takes part with no tensors.
        rank: global rank of this process.
        tensors: canonical name -> local tensor.
        group: group of all ranks of ``layout``; ``None`` is the default group.

    Returns:
        Name -> integer in 0 ... 2**64 - 1, the same on every rank of the group and in every layout.
    """
    values = _local(specs, layout, rank, tensors, chunk_bytes, _device(tensors, group))
    if _distributed(group):
        dist.all_reduce(values, group=group)
    return {spec.name: value % _MODULUS for spec, value in zip(specs, values.tolist(), strict=True)}


def _device(tensors: Tensors, group: "dist.ProcessGroup | None") -> torch.device:
    """Where the results go: beside the tensors; a rank without any still has to suit the group's backend."""
    for tensor in tensors.values():
        return tensor.device
    if _distributed(group) and "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _distributed(group: "dist.ProcessGroup | None") -> bool:
    return group is not None or (dist.is_available() and dist.is_initialized())


def _lookup(tensors: Tensors, name: str, rank: int) -> torch.Tensor:
    if name not in tensors:
        raise KeyError(f"rank {rank}: parameter {name} is missing among {len(tensors)} tensors")
    return tensors[name]


def _local(
    specs: Sequence[ParamSpec], layout: ShardLayout, rank: int, tensors: Tensors, chunk_bytes: int, device: torch.device
) -> torch.Tensor:
    values = torch.zeros(len(specs), dtype=torch.int64, device=device)
    weights = _Weights(device)
    for index, spec in enumerate(specs):
        mine = [atom.at(rank) for atom in layout.atoms(spec) if atom.holders[0] == rank]
        if mine:
            values[index] = fingerprint_boxes(_lookup(tensors, spec.name, rank), mine, chunk_bytes, weights)
    return values


def replica_differences(
    specs: Sequence[ParamSpec],
    layout: ShardLayout,
    rank: int,
    tensors: Tensors,
    group: "dist.ProcessGroup | None" = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[str]:
    """Atoms whose copies are not bit-equal on all holders, in words; empty when all are. Collective over ``group``."""
    every = [(spec.name, atom) for spec in specs for atom in layout.atoms(spec)]
    device = _device(tensors, group)
    lowest = torch.full((len(every),), torch.iinfo(torch.int64).max, dtype=torch.int64, device=device)
    highest = torch.full_like(lowest, torch.iinfo(torch.int64).min)
    weights = _Weights(device)
    for index, (name, atom) in enumerate(every):
        if rank in atom.place:
            value = fingerprint_boxes(_lookup(tensors, name, rank), [atom.at(rank)], chunk_bytes, weights)
            lowest[index] = highest[index] = value
    if _distributed(group):
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    unequal = torch.nonzero(lowest < highest).view(-1).tolist()
    return [
        f"{name}: {tuple(atom.box)} (row, column, rows, columns) differs among ranks {atom.holders}"
        for name, atom in (every[i] for i in unequal)
    ]


def replicas_equal(
    specs: Sequence[ParamSpec],
    layout: ShardLayout,
    rank: int,
    tensors: Tensors,
    group: "dist.ProcessGroup | None" = None,
) -> bool:
    """Whether every copy of every box is bit-equal on all of its holders. Collective over ``group``."""
    return not replica_differences(specs, layout, rank, tensors, group)


def compare(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Differences between two sets of fingerprints, in words; empty when they are the same."""
    out = [f"{name}: missing" for name in expected if name not in found]
    out += [f"{name}: not expected" for name in found if name not in expected]
    out += [
        f"{name}: expected {expected[name]:016x}, found {found[name]:016x}"
        for name in expected
        if name in found and expected[name] != found[name]
    ]
    return out


def fold(fingerprints: Mapping[str, int]) -> str:
    """One short hexadecimal number for the whole model; names count, their order does not."""
    text = reduce(lambda out, item: out + f"{item[0]}={item[1]:016x};", sorted(fingerprints.items()), "")
    return sha256(text.encode()).hexdigest()[:16]
