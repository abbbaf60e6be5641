"""Whether two checkpoints, of whatever formats, hold the same model; or one what was written into it."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rl3d.io.hf_reader import CheckpointError
from rl3d.io.source import Source
from rl3d.models import MappedParameter

_BLOCK = 1 << 20  # elements compared at a time


@dataclass(frozen=True)
class Tolerance:
    """Values a and b agree where ``|a - b| <= atol + rtol * |b|`` (numpy's and torch's ``allclose``)."""

    rtol: float = 0.0
    atol: float = 0.0


def differences(a: Source, b: Source, tolerance: Tolerance | None = None) -> list[str]:
    """In words; empty when architecture and every bit of every parameter agree, or every value within ``tolerance``.

    Raises :class:`CheckpointError` when bits are compared and the dtypes differ: read both as one (``dtype`` of
    :class:`Source`), or give a tolerance.
    """
    out = [
        f"{f.name}: {getattr(a.arch, f.name)!r} in {a.path}, {getattr(b.arch, f.name)!r} in {b.path}"
        for f in fields(a.arch) if getattr(a.arch, f.name) != getattr(b.arch, f.name)
    ]  # fmt: skip
    if [m.spec for m in a.parameters] != [m.spec for m in b.parameters]:
        return [*out, "the models have other parameters; their values were not compared"]
    if tolerance is not None:
        return out + [line for m in a.parameters if (line := _apart(m, a.read(m), b.read(m), tolerance))]
    if a.dtype != b.dtype:
        raise CheckpointError(
            f"{a.path} is {a.dtype}, {b.path} is {b.dtype}; say --dtype to compare both as one, or --rtol and --atol"
        )
    for mapped in a.parameters:
        one, two = a.fingerprint(mapped), b.fingerprint(mapped)
        if one != two:
            out.append(f"{mapped.spec.name} (from {_names(mapped)}): fingerprint {one:016x}, other {two:016x}")
    return out


def _apart(mapped: MappedParameter, a: Tensor, b: Tensor, tolerance: Tolerance) -> str | None:
    worst, count, limit = 0.0, 0, 0.0
    for x, y in zip(a.view(-1).split(_BLOCK), b.view(-1).split(_BLOCK), strict=True):
        y = y.double()
        apart = (x.double() - y).abs_()
        allowed = y.abs_().mul_(tolerance.rtol).add_(tolerance.atol)
        beyond = apart > allowed
        count += int(beyond.sum())
        if beyond.any():
            at = int(torch.where(beyond, apart, -1.0).argmax())
            if float(apart[at]) > worst:
                worst, limit = float(apart[at]), float(allowed[at])
    if not count:
        return None
    return (
        f"{mapped.spec.name} (from {_names(mapped)}): {count:,} of {a.numel():,} values lie further apart than allowed, up "
        f"to {worst:.3g} where {limit:.3g} is"
    )


def changes(source: Source) -> list[str]:
    """What differs from the fingerprints that the conversion recorded.

    Raises :class:`CheckpointError` when there are none.
    """
    manifest = source.manifest()
    if manifest is None:
        raise CheckpointError(f"{source.path} has no record of a conversion; name a second checkpoint to compare with")
    dtype = str(source.dtype).removeprefix("torch.")
    if dtype != manifest["dtype"]:
        return [f"dtype: {dtype}, recorded {manifest['dtype']}"]
    recorded = {item["name"]: item["fingerprint"] for item in manifest["items"]}
    out = [
        f"{name}: recorded, but no parameter of the model"
        for name in recorded.keys() - {m.spec.name for m in source.parameters}
    ]
    for mapped in source.parameters:
        found, right = f"{source.fingerprint(mapped):016x}", recorded.get(mapped.spec.name)
        if found != right:
            out.append(f"{mapped.spec.name} (from {_names(mapped)}): fingerprint {found}, recorded {right}")
    return out


def _names(mapped: Any) -> str:
    return ", ".join(dict.fromkeys(s.hf_name for s in mapped.segments))
