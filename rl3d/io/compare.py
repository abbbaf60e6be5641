"""Whether two checkpoints, of whatever formats, hold the same model; or one what was written into it."""

from dataclasses import fields
from typing import Any

from rl3d.io.hf_reader import CheckpointError
from rl3d.io.source import Source


def differences(a: Source, b: Source) -> list[str]:
    """In words; empty when architecture and every bit of every parameter agree.

    Raises :class:`CheckpointError` when the dtypes differ: read both as one (``dtype`` of :class:`Source`).
    """
    out = [
        f"{f.name}: {getattr(a.arch, f.name)!r} in {a.path}, {getattr(b.arch, f.name)!r} in {b.path}"
        for f in fields(a.arch) if getattr(a.arch, f.name) != getattr(b.arch, f.name)
    ]  # fmt: skip
    if [m.spec for m in a.parameters] != [m.spec for m in b.parameters]:
        return [*out, "the models have other parameters; their values were not compared"]
    if a.dtype != b.dtype:
        raise CheckpointError(f"{a.path} is {a.dtype}, {b.path} is {b.dtype}; say --dtype to compare both as one")
    for mapped in a.parameters:
        one, two = a.fingerprint(mapped), b.fingerprint(mapped)
        if one != two:
            out.append(f"{mapped.spec.name} (from {_names(mapped)}): fingerprint {one:016x}, other {two:016x}")
    return out


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
