"""The plan: who sends which box to whom, as columns. Data only; made by the planner, carried out by the executor."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILL = -1
"""Value of ``src`` for padding rows: zeros are written, nothing is moved."""

_COLUMNS = {
    "param": np.int32, "src": np.int32, "dst": np.int32, "row": np.int64, "col": np.int64, "rows": np.int64,
    "cols": np.int64, "src_offset": np.int64, "src_pitch": np.int64, "dst_offset": np.int64, "dst_pitch": np.int64,
    "nbytes": np.int64, "bucket": np.int32,
}  # fmt: skip


class ReshardError(RuntimeError):
    """Weights that do not fit a plan, or ranks that disagree. Raised on every rank, before anything is sent."""


@dataclass(frozen=True)
class Rows:
    """Columns of a plan, one entry per box.

    ``src == FILL`` writes zeros into padding; ``src == dst`` is a copy inside a rank; the rest goes over the wire in
    bucket ``bucket`` (-1 for the other two kinds). The global box is ``(row, col, rows, cols)`` of the matrix view.
    Local positions are flat element offsets with a row pitch. Sorted by bucket, source, destination, then by falling
    element size, so that elements inside a packed message are aligned without padding.
    """

    param: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    row: NDArray[np.int64]
    col: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    src_offset: NDArray[np.int64]
    src_pitch: NDArray[np.int64]
    dst_offset: NDArray[np.int64]
    dst_pitch: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    bucket: NDArray[np.int32]

    @classmethod
    def from_table(cls, table: NDArray[np.int64]) -> "Rows":
        """From an integer table whose columns are in field order."""
        return cls(*(np.ascontiguousarray(table[:, i], dtype) for i, dtype in enumerate(_COLUMNS.values())))

    def __len__(self) -> int:
        return len(self.param)

    def take(self, index: NDArray[Any]) -> "Rows":
        """The chosen rows (index array or mask)."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Mask of rows that go over the wire."""
        return (self.src != self.dst) & (self.src != FILL)


@dataclass(frozen=True)
class Side:
    """What one of the two layouts expects of every rank's local tensors."""

    name: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    holds: NDArray[np.bool_] = field(repr=False)
    """(parameters, ranks up to the highest): whether the rank has a local tensor for the parameter."""

    def expected(self, rank: int) -> NDArray[np.int64]:
        """Indices of the parameters that ``rank`` holds."""
        if rank >= self.holds.shape[1]:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.holds[:, rank])


@dataclass(frozen=True)
class Certificate:
    """What a plan costs and the least that it could cost, in bytes.

    ``received`` and ``bound`` follow ``destination_ranks``; ``sent`` follows ``source_ranks``. The bound of a rank is
    what it must hold afterwards minus what it already holds; it is computed from the layouts, not from the plan.
    """

    source: str
    destination: str
    source_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    received: tuple[int, ...]
    bound: tuple[int, ...]
    sent: tuple[int, ...]
    local: int
    between_nodes: int
    rows: int
    buckets: int
    staging_bytes: int
    staging_peak: int

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> "Certificate":
        """From ``asdict`` that went through JSON, which turns tuples into lists."""
        fixed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fixed)

    @property
    def ratio(self) -> float:
        """Received bytes over the lower bound; 1.0 is optimal."""
        return 1.0 if not sum(self.bound) else sum(self.received) / sum(self.bound)

    def to_json(self) -> dict[str, Any]:
        """Plain data with mean and maximum beside the lists."""
        return asdict(self) | {
            "ratio": self.ratio,
            "received_mean": _mean(self.received), "received_max": max(self.received, default=0),
            "bound_mean": _mean(self.bound), "bound_max": max(self.bound, default=0),
            "sent_mean": _mean(self.sent), "sent_max": max(self.sent, default=0),
        }  # fmt: skip


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Plan:
    """A resharding plan for all ranks; equal inputs give an equal plan on every rank."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    source: Side
    destination: Side
    rows: Rows
    certificate: Certificate

    @property
    def staging_bytes(self) -> int:
        return self.certificate.staging_bytes

    @cached_property
    def hash(self) -> str:
        """SHA-256 of names, dtypes, shapes and all rows; the same on every machine."""
        digest = hashlib.sha256(json.dumps(self._meta(), sort_keys=True).encode())
        for name, dtype in _COLUMNS.items():
            digest.update(np.ascontiguousarray(getattr(self.rows, name), np.dtype(dtype).newbyteorder("<")).tobytes())
        for side in (self.source, self.destination):
            digest.update(np.packbits(side.holds).tobytes())
        return digest.hexdigest()

    def _meta(self) -> dict[str, Any]:
        sides = [{"name": s.name, "ranks": s.ranks, "shapes": s.shapes} for s in (self.source, self.destination)]
        return {"names": self.names, "dtypes": self.dtypes, "sides": sides, "certificate": asdict(self.certificate)}

    def to_json(self) -> dict[str, Any]:
        """The certificate and the hash, ready for ``json.dump``; rows go to :meth:`save`."""
        return {"hash": self.hash, "parameters": len(self.names), **self.certificate.to_json()}

    def save(self, path: str | Path) -> None:
        """Write everything to an ``.npz`` file."""
        columns = {name: getattr(self.rows, name) for name in _COLUMNS}
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                meta=np.array(json.dumps(self._meta() | {"hash": self.hash})),
                source_holds=self.source.holds,
                destination_holds=self.destination.holds,
                **columns,
            )

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read :meth:`save`'s file. Raises :class:`ReshardError` when its contents do not match its hash."""
        with np.load(path, allow_pickle=False) as data:
            meta = json.loads(str(data["meta"]))
            sides = [
                Side(s["name"], tuple(s["ranks"]), tuple(tuple(x) for x in s["shapes"]), data[f"{label}_holds"])
                for label, s in zip(("source", "destination"), meta["sides"], strict=True)
            ]
            rows = Rows(**{name: data[name] for name in _COLUMNS})
        certificate = Certificate.from_fields(meta["certificate"])
        plan = cls(tuple(meta["names"]), tuple(meta["dtypes"]), sides[0], sides[1], rows, certificate)
        if plan.hash != meta["hash"]:
            raise ReshardError(f"plan file {path}: found hash {plan.hash}, expected {meta['hash']}; build it again")
        return plan

    def summary_table(self) -> Any:
        """A ``rich`` table for people: bytes per rank beside the bound."""
        from rich.table import Table

        cert = self.certificate.to_json()
        table = Table(title=f"{self.source.name} -> {self.destination.name}", title_style="bold")
        for heading in ("GB per rank", "mean", "max"):
            table.add_column(heading, justify="left" if heading == "GB per rank" else "right", min_width=10)
        for label in ("received", "bound", "sent"):
            table.add_row(label, f"{cert[label + '_mean'] / 1e9:.3f}", f"{cert[label + '_max'] / 1e9:.3f}")
        ranks = max(len(self.certificate.destination_ranks), 1)
        table.add_row("kept in place", f"{cert['local'] / ranks / 1e9:.3f}", "")
        table.add_row("received / bound", f"{cert['ratio']:.4f}", "")
        table.add_row("between nodes (all)", f"{cert['between_nodes'] / 1e9:.3f}", "")
        table.add_row("boxes, buckets", str(cert["rows"]), str(cert["buckets"]))
        table.add_row("staging MiB, cap", *(f"{cert[key] / 2**20:.1f}" for key in ("staging_peak", "staging_bytes")))
        table.add_row("plan", self.hash[:8], "")
        return table
