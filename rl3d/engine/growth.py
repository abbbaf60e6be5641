"""The optimiser's state across a larger vocabulary: parameter by parameter, through host memory.

With another vocabulary everything lies elsewhere in the partitions of ZeRO. Each rank keeps its own partition in host
memory while the model is made again; then, for one parameter after the other, the ranks that share it put the pieces
together, the rows of the vocabulary are cut anew, and each takes what its new partition wants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.engine.carry import named_spans
from rl3d.engine.training import TrainingEngine
from rl3d.engine.vocabulary import VOCABULARY
from rl3d.models.build import canonical_parameters


@dataclass
class KeptState:
    """A rank's optimiser state in host memory: ``tensors`` by kind (``master`` and AdamW's), one for each of ``spans``;
    ``scalars`` are AdamW's counts of steps."""

    spans: list[list[tuple[str, int, int, int]]]
    tensors: dict[str, list[Tensor]]
    scalars: dict[str, Any]


@torch.no_grad()
def keep(engine: TrainingEngine) -> KeptState:
    """Copy this rank's master weights and moments to host memory."""
    state = engine.zero.state_dict()
    first: Mapping[str, Any] = next((s for s in state["adam"] if s), {})
    tensors = {"master": state["master"]}
    tensors |= {key: [s[key] for s in state["adam"]] for key, value in first.items() if value.dim()}
    return KeptState(named_spans(engine), {key: [t.reshape(-1).cpu() for t in parts] for key, parts in tensors.items()},
                     {key: value for key, value in first.items() if not value.dim()})  # fmt: skip


@torch.no_grad()
def restore(engine: TrainingEngine, kept: KeptState, vocab_size: int) -> None:
    """Make ``kept`` the state of an engine of the same layout whose model has more tokens. Collective over tp and dp.

    Master weights of new rows are the mean of the old ones, their moments zero. AdamW's count of steps goes on, and with it
    its correction of young moments: the first step of a new row is up to three learning rates long (0.1 / sqrt(0.001)).

    Args:
        vocab_size: rows of the old vocabulary, padding left out; ``engine.arch`` has the new one.
    """
    groups, spans, masters = engine.groups, named_spans(engine), engine.zero.master_partitions()
    shapes = {name: p.shape if not hasattr(p, "ds_shape") else p.ds_shape
              for name, p in canonical_parameters(engine.model, engine.arch, groups).items()}  # fmt: skip
    out = {key: [torch.zeros(m.numel()) for m in masters] for key in kept.tensors}
    for name in sorted(shapes):
        for key in kept.tensors:
            whole = _old_shard(kept, name, key, groups.dp)
            if name in VOCABULARY:
                whole = _grown(whole, key, shapes[name], vocab_size, engine.arch.vocab_size, groups)
            for flat, held in zip(out[key], spans, strict=True):
                for held_name, start, stop, at in held:
                    if held_name == name:
                        flat[at : at + stop - start] = whole[start:stop]
    moments = [{**kept.scalars, **{key: parts[i] for key, parts in out.items() if key != "master"}} if kept.scalars else {}
               for i in range(len(masters))]  # fmt: skip
    engine.zero.load_state_dict({"master": out["master"], "adam": moments})


def _old_shard(kept: KeptState, name: str, key: str, group: dist.ProcessGroup) -> Tensor:
    """A tensor-parallel shard as it was, flat, of the pieces that data-parallel ranks hold."""
    mine = [(start, stop, flat[at : at + stop - start].clone())
            for flat, held in zip(kept.tensors[key], kept.spans, strict=True)
            for held_name, start, stop, at in held if held_name == name]  # fmt: skip
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    pieces = {start: (stop, piece) for held in everyone for start, stop, piece in held}
    whole = torch.empty(max(stop for stop, _ in pieces.values()))
    for start, (stop, piece) in pieces.items():
        whole[start:stop] = piece
    return whole


def _grown(shard: Tensor, key: str, shape: torch.Size, old: int, new: int, groups: Any) -> Tensor:
    """This rank's rows, flat, of ``shape``; ``old`` and ``new`` are the rows of the vocabularies without padding."""
    columns = shape[1]
    everyone: list[Any] = [None] * groups.tp_size
    dist.all_gather_object(everyone, shard.view(-1, columns), group=groups.tp)
    known = torch.cat(everyone)[:old]
    whole = torch.zeros(shape[0] * groups.tp_size, columns)
    whole[:old] = known
    if key == "master":
        whole[old:new] = known.mean(0)
    return whole[groups.tp_rank * shape[0] : (groups.tp_rank + 1) * shape[0]].reshape(-1)
