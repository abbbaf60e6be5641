"""Brute force: whole arrays, cut with numpy. Shares no code with rl3d beyond ParamSpec's fields."""

from collections.abc import Iterable

import numpy as np
import torch

from rl3d.layout import ParamSpec

PAD = 77
BITS = {"float32": np.int32, "bfloat16": np.int16, "float64": np.int64}


def whole(specs: Iterable[ParamSpec]) -> dict[str, np.ndarray]:
    """Whole parameters as bit patterns: every element different (modulo its width), padding rows set to PAD."""
    out, start = {}, 1
    for spec in specs:
        size = int(np.prod(spec.shape))
        array = (np.arange(start, start + size) * 31).astype(BITS[spec.dtype]).reshape(spec.shape)
        if spec.valid_rows is not None:
            array[spec.valid_rows :] = PAD
        out[spec.name] = array
        start += size
    return out


def cut(spec: ParamSpec, array: np.ndarray, tp: int, index: int) -> np.ndarray:
    """Shard ``index`` of ``tp``: every block cut in tp parts, the parts of one index joined."""
    if spec.dim is None:
        return array
    blocks = np.split(array, np.cumsum(spec.blocks)[:-1], axis=spec.dim)
    return np.ascontiguousarray(np.concatenate([np.split(b, tp, axis=spec.dim)[index] for b in blocks], axis=spec.dim))


def train_place(sizes: dict[str, int], order: tuple[str, ...], rank: int) -> dict[str, int]:
    """Coordinates of a rank: the first axis of ``order`` varies fastest; ``dp:2`` is the lowest digit of dp."""
    place, weight = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 1)
    for name in order:
        axis, _, part = name.partition(":")
        size = int(part) if part else sizes[axis] // weight[axis]
        rank, digit = divmod(rank, size)
        place[axis] += digit * weight[axis]
        weight[axis] *= size
    return place


def on_stage(spec: ParamSpec, stage: int, pp: int, num_layers: int, vpp: int = 1) -> bool:
    if spec.layer is not None:
        chunks = np.array_split(np.arange(num_layers), pp * vpp)  # the first ones hold one more
        return any(spec.layer in chunk for chunk in chunks[stage::pp])
    return (stage == 0 and spec.place.startswith("pre")) or (stage == pp - 1 and spec.place.endswith("post"))


def flat_part(array: np.ndarray, parts: int, index: int, tail: int) -> np.ndarray:
    """ZeRO-3: the flattened array padded to a multiple of ``parts`` and cut into equal parts."""
    flat = np.concatenate([array.reshape(-1), np.full(-array.size % parts, tail, array.dtype)])
    return np.split(flat, parts)[index]


def expert_place(spec: ParamSpec, index: int, experts: tuple[int, int, int]) -> tuple[bool, int, int]:
    """(whether a rank of its stage holds the expert, its cut, its replica); ranks are expert tp, then ep, then replica."""
    count, ep, tp = experts
    index, cut_index = divmod(index, tp)
    replica, home = divmod(index, ep)
    return spec.expert // (count // ep) == home, cut_index, replica


def own_part(
    specs: list[ParamSpec], locals_: dict[str, np.ndarray], stage: int, part: int, parts: int, invalid: int
) -> dict[str, np.ndarray]:
    """Optimiser partitions: all tensors end to end, padded to a multiple of 2 * parts, cut; the rest is not valid."""
    order = [s.name for s in specs if s.name in locals_ and not (stage and s.place == "pre+post")]
    order += [n for n in locals_ if n not in order]
    flat = np.concatenate([np.full(locals_[n].size, i) for i, n in enumerate(order)])
    size = (len(flat) + -len(flat) % (2 * parts)) // parts
    out = {}
    start = 0
    for name in order:
        whole = locals_[name].reshape(-1).copy()
        at = np.arange(start, start + whole.size)
        whole[at // size != part] = invalid
        out[name] = whole.reshape(locals_[name].shape)
        start += whole.size
    return out


def shards(
    specs: list[ParamSpec],
    arrays: dict[str, np.ndarray],
    places: dict[int, tuple[int, ...]],
    tp: int,
    pp: int,
    vpp: int = 1,
    parts: int | None = None,
    tail: int = 0,
    experts: tuple[int, int, int] = (0, 1, 1),
    partitions: int | None = None,
) -> dict[int, dict[str, np.ndarray]]:
    """rank -> name -> local array, for rank -> (stage, tp index, dp index).

    ``parts`` cuts flat shards (ZeRO-3), padded with ``tail``; ``experts`` is (experts, ep, expert tp); ``partitions`` is
    dp where only a rank's optimiser partition is valid, the rest being ``tail``.
    """
    num_layers = max(spec.layer for spec in specs if spec.layer is not None) + 1
    out: dict[int, dict[str, np.ndarray]] = {}
    for rank, (stage, i, *part) in places.items():
        dp = part[0] if part else 0
        out[rank] = {}
        for s in specs:
            if not on_stage(s, stage, pp, num_layers, vpp):
                continue
            size, index, flat, flats = tp, i, dp, parts
            if s.expert is not None:
                held, index, flat = expert_place(s, i + tp * dp, experts)
                size = experts[2]
                if not held:
                    continue
                if parts is not None:
                    flats = tp * parts // (experts[1] * experts[2])
            whole = cut(s, arrays[s.name], size, index)
            out[rank][s.name] = whole if flats is None else flat_part(whole, flats, flat, tail)
        if partitions is not None:
            out[rank] = own_part(specs, out[rank], stage, dp, partitions, tail)
    return out


def to_torch(specs: list[ParamSpec], local: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    dtypes = {s.name: getattr(torch, s.dtype) for s in specs}
    return {name: torch.from_numpy(a.copy()).view(dtypes[name]) for name, a in local.items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer).numpy()


def missing_bytes(spec: ParamSpec, before: np.ndarray | None, after: np.ndarray) -> int:
    """Bytes of real values in a local array of element numbers ``after`` that ``before`` does not have."""
    wanted = after[after >= 0]
    have = np.zeros(0, np.int64) if before is None else before.reshape(-1)
    return int(np.setdiff1d(wanted, have).size) * np.dtype(BITS[spec.dtype]).itemsize


def numbered(specs: Iterable[ParamSpec]) -> dict[str, np.ndarray]:
    """Whole parameters as element numbers; -1 in padding."""
    out = {}
    for spec in specs:
        out[spec.name] = np.arange(int(np.prod(spec.shape))).reshape(spec.shape)
        if spec.valid_rows is not None:
            out[spec.name][spec.valid_rows :] = -1
    return out
