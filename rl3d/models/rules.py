"""What a rule is, and the bijections between rows of Megatron parameters and of Hugging Face tensors.

A rule says which Hugging Face tensors make up one Megatron (canonical) parameter, in which order of rows, and how tensor
parallelism cuts it. Every correspondence is a list of row segments, so that any rank can read exactly the slice it needs,
and the export is the same list read backwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rl3d.models.architecture import Architecture

Rows = Callable[[Architecture], int]


class Segment(NamedTuple):
    """``length`` rows of ``hf_name`` from ``hf_start`` are rows ``start ...`` of the canonical parameter."""

    hf_name: str
    hf_start: int
    start: int
    length: int


Segments = Callable[[Architecture, str], list[Segment]]


@dataclass(frozen=True)
class Rule:
    """One canonical parameter (``{i}`` = global layer) and where its rows are in the Hugging Face checkpoint.

    Attributes:
        dim, blocks: :class:`~rl3d.layout.ParamSpec`'s.
        segments: gets the architecture and the Hugging Face prefix of the layer (and expert).
        condition: the rule exists for architectures that satisfy it.
        mlp: for a parameter of a layer, whether it is there in every layer (``""``), in ``"dense"`` or ``"sparse"`` ones.
        expert: Hugging Face prefix of an expert in its layer, ``{e}`` the expert; the rule then stands for one parameter
            of every expert, and ``{e}`` is in its name, too.
        keeps_dtype: whatever dtype the model is converted to, this parameter keeps the one it is stored in.
    """

    name: str
    shape: Callable[[Architecture], tuple[int, ...]]
    segments: Segments
    dim: int | None = None
    blocks: Callable[[Architecture], tuple[int, ...]] | None = None
    place: str = "layer"
    vocabulary: bool = False
    condition: Callable[[Architecture], bool] = lambda a: True
    mlp: str = ""
    expert: str = ""
    keeps_dtype: bool = False


def whole(hf_name: str, rows: Rows) -> Segments:
    """The parameter is one Hugging Face tensor."""
    return lambda a, prefix: [Segment(prefix + hf_name, 0, 0, rows(a))]


def _qkv_rows(a: Architecture) -> Iterator[tuple[str, int, int, int]]:
    """(projection, row of it, row of the fused parameter, rows) of every run.

    Megatron interleaves by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...].
    """
    d, per_group = a.head_dim, a.num_heads // a.num_kv_heads
    row = 0
    for g in range(a.num_kv_heads):
        for proj, start, rows in (("q", g * per_group * d, per_group * d), ("k", g * d, d), ("v", g * d, d)):
            yield proj, start, row, rows
            row += rows


def grouped_qkv(a: Architecture, prefix: str, kind: str = "weight") -> list[Segment]:
    """Projections of their own for queries, keys and values."""
    return [Segment(f"{prefix}self_attn.{proj}_proj.{kind}", *rows) for proj, *rows in _qkv_rows(a)]


def packed_qkv(a: Architecture, prefix: str) -> list[Segment]:
    """phi-3 keeps one tensor of rows [all q; all k; all v]."""
    name = f"{prefix}self_attn.qkv_proj.weight"
    first = {"q": 0, "k": a.num_heads * a.head_dim, "v": (a.num_heads + a.num_kv_heads) * a.head_dim}
    return [Segment(name, first[proj] + start, row, rows) for proj, start, row, rows in _qkv_rows(a)]


def gate_up(gate: str, up: str, size: Rows) -> Segments:
    """The rows of the gate, then those of the up projection."""
    return lambda a, prefix: [
        Segment(prefix + gate, 0, 0, size(a)),
        Segment(prefix + up, 0, size(a), size(a)),
    ]
