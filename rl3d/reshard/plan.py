"""The plan: who sends which box to whom, as columns. Data only; made by the planner, carried out by the executor."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl3d.reshard.boxes import Ints
from rl3d.reshard.certificate import Certificate
from rl3d.reshard.rows import FILL, Rows, expand
from rl3d.reshard.schedule import Segments
from rl3d.reshard.traffic import Boxes

__all__ = ["FILL", "Certificate", "Plan", "ReshardError", "Rows", "Side"]


class ReshardError(RuntimeError):
    """Weights that do not fit a plan, or ranks that disagree. Raised on every rank, before anything is sent."""


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
class Plan:
    """A resharding plan for all ranks; equal inputs give an equal plan on every rank.

    The plan proper is ``segments``: runs of bytes of classes of boxes. Rows, one per box, are written out on demand:
    :meth:`rows_of` one rank's, :attr:`rows` everybody's.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    source: Side
    destination: Side
    boxes: Boxes
    segments: Segments
    fills: Ints
    certificate: Certificate

    @property
    def staging_bytes(self) -> int:
        return self.certificate.staging_bytes

    @cached_property
    def rows(self) -> Rows:
        """Rows of all ranks."""
        return expand(self.boxes, self.segments, self.fills)

    def rows_of(self, rank: int) -> Rows:
        """Rows that ``rank`` sends, receives, copies or fills."""
        mine = np.flatnonzero((self.segments.src == rank) | (self.segments.dst == rank))
        return expand(self.boxes, self.segments.take(mine), self.fills[self.fills[:, 1] == rank])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of names, dtypes, shapes and everything that rows are made of; the same on every machine."""
        digest = hashlib.sha256(json.dumps(self._meta(), sort_keys=True).encode())
        for name, column in sorted(self._columns().items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def _columns(self) -> dict[str, NDArray[Any]]:
        holds = {"source_holds": self.source.holds, "destination_holds": self.destination.holds}
        segments = {f"segment_{name}": column for name, column in self.segments._asdict().items()}
        return {**self.boxes.columns(), **segments, "fills": self.fills, **{k: np.packbits(v) for k, v in holds.items()}}

    def _meta(self) -> dict[str, Any]:
        sides = [{"name": s.name, "ranks": s.ranks, "shapes": s.shapes} for s in (self.source, self.destination)]
        return {"names": self.names, "dtypes": self.dtypes, "sides": sides, "certificate": asdict(self.certificate)}

    def to_json(self) -> dict[str, Any]:
        """The certificate and the hash, ready for ``json.dump``; rows go to :meth:`save`."""
        return {"hash": self.hash, "parameters": len(self.names), **self.certificate.to_json()}

    def save(self, path: str | Path) -> None:
        """Write everything to an ``.npz`` file."""
        with open(path, "wb") as file:
            arrays: dict[str, Any] = {"meta": np.array(json.dumps(self._meta() | {"hash": self.hash})), **self._columns()}
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read :meth:`save`'s file. Raises :class:`ReshardError` when its contents do not match its hash."""
        with np.load(path, allow_pickle=False) as data:
            meta = json.loads(str(data["meta"]))
            arrays = {name: data[name] for name in data.files if name != "meta"}
        names = tuple(meta["names"])
        sides = []
        for label, side in zip(("source", "destination"), meta["sides"], strict=True):
            ranks = max(side["ranks"], default=-1) + 1
            size = max((r for s in meta["sides"] for r in s["ranks"]), default=ranks - 1) + 1
            holds = np.unpackbits(arrays[f"{label}_holds"], count=len(names) * size).astype(bool).reshape(len(names), size)
            sides.append(Side(side["name"], tuple(side["ranks"]), tuple(tuple(x) for x in side["shapes"]), holds))
        boxes = Boxes(**{f.name: arrays[f.name] for f in fields(Boxes)})
        segments = Segments(*(arrays[f"segment_{name}"] for name in Segments._fields))
        certificate = Certificate.from_fields(meta["certificate"])
        plan = cls(names, tuple(meta["dtypes"]), sides[0], sides[1], boxes, segments, arrays["fills"], certificate)
        if plan.hash != meta["hash"]:
            raise ReshardError(f"plan file {path}: found hash {plan.hash}, expected {meta['hash']}; build it again")
        return plan

    def summary_table(self) -> Any:
        """A ``rich`` table for people: bytes per rank beside the bounds."""
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
        # Where bytes cross nodes, few of them come before few for the busiest sender in all.
        levels = ("between", "inside") if cert["between_nodes"] else ("sent",)
        for level in levels:
            name = {
                "sent": "busiest sender / bound",
                "between": "busiest between nodes / bound",
                "inside": "busiest inside a node / bound",
            }[level]
            table.add_row(name, "", f"{cert['ratios'][level]:.4f}")
        table.add_row("between nodes (all)", f"{cert['between_nodes'] / 1e9:.3f}", "")
        table.add_row("boxes, buckets", str(cert["rows"]), str(cert["buckets"]))
        table.add_row("staging MiB, cap", *(f"{cert[key] / 2**20:.1f}" for key in ("staging_peak", "staging_bytes")))
        table.add_row("plan", self.hash[:8], "")
        return table
