"""Plans on disk, by what they were made from: the next start of the same run reads its plan instead of making it.

A plan is two files, ``KEY.json`` with the certificate and ``KEY.npz`` with everything rows are made of. The key covers
all inputs and the planner's own code, so an entry never has to be updated; a damaged one is made again.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from rl3d.layout import ParamSpec, ShardLayout
from rl3d.reshard.plan import Plan, ReshardError
from rl3d.reshard.planner import build_plan

VARIABLE = "RL3D_PLAN_CACHE"
"""Environment variable: another directory, or ``off``."""


def cache_directory() -> Path | None:
    """Where plans are kept: ``RL3D_PLAN_CACHE``, else ``rl3d/plans`` in the user's cache directory; ``None`` when off."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in ("off", "0", "none"):
        return None
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "rl3d" / "plans"


@cache
def _code() -> str:
    """Digest of the modules that decide what a plan is, so that another version of them never reads this one's plans."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*here.glob("*.py"), *(here.parent / "layout").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def plan_key(
    specs: Sequence[ParamSpec], src: ShardLayout, dst: ShardLayout, staging_bytes: int, nodes: Sequence[int] | None
) -> str:
    """Digest of everything that a plan depends on."""
    parts = [_code(), [astuple(s) for s in specs], src.describe(), dst.describe(), staging_bytes]
    parts.append(None if nodes is None else list(nodes))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def cached_plan(
    specs: Sequence[ParamSpec],
    src: ShardLayout,
    dst: ShardLayout,
    *,
    staging_bytes: int = 64 << 20,
    nodes: Sequence[int] | None = None,
    directory: str | Path | None = None,
) -> Plan:
    """:func:`rl3d.reshard.build_plan` through the cache in ``directory`` (:func:`cache_directory` when left out).

    Any number of ranks may ask at once: files appear complete or not at all. A cache that cannot be read or written is
    no error, the plan is made. Raises what ``build_plan`` raises.
    """
    place = cache_directory() if directory is None else Path(directory)
    if place is None:
        return build_plan(specs, src, dst, staging_bytes=staging_bytes, nodes=nodes)
    file = place / f"{plan_key(specs, src, dst, staging_bytes, nodes)}.npz"
    try:
        return Plan.load(file)
    except (OSError, ReshardError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        pass
    plan = build_plan(specs, src, dst, staging_bytes=staging_bytes, nodes=nodes)
    try:
        _write(plan, file)
    except OSError:
        pass
    return plan


def _write(plan: Plan, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=file.parent) as scratch:
        made = Path(scratch) / "plan"
        plan.save(made)
        report = Path(scratch) / "certificate"
        report.write_text(json.dumps(plan.to_json(), indent=1))
        os.replace(report, file.with_suffix(".json"))
        os.replace(made, file)
