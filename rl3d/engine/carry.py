"""Training state that outlives its layout: master weights and moments of one layout read into any other.

What a rank saves says which elements of which parameter it is, so that reading needs neither the ranks nor the layout that
wrote it: each rank cuts the boxes it needs out of the files (mapped, not read) of those that held them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.distributed.bootstrap import Runtime
from rl3d.engine.training import TrainingEngine
from rl3d.layout import ParamSpec
from rl3d.layout.regions import Holding
from rl3d.layout.shards import Cell
from rl3d.models import parameter_specs
from rl3d.models.build import canonical_parameters, model_chunks

_Spans = list[list[tuple[str, int, int, int]]]
"""For each master partition: canonical name, first and last element of the flattened shard, place in the partition."""


class CarryError(ValueError):
    """State that cannot become this engine's; the message says what is missing or differs."""


def training_state(engine: TrainingEngine) -> dict[str, Any]:
    """Master weights and AdamW state of this rank with what they are. Values are tensors and plain data."""
    return {
        **engine.zero.state_dict(),
        "spans": named_spans(engine),
        "tp": [engine.groups.tp_size, engine.groups.tp_rank],
        "padded_vocab": _padded_vocab(engine),
        "model": _model(engine),
    }


def carry_over(engine: TrainingEngine, parts: Sequence[dict[str, Any]], runtime: Runtime) -> None:
    """Make ``parts``, what every rank of some layout saved with :func:`training_state`, the state of ``engine`` in its own
    layout: each rank takes its elements, bit for bit. Collective over all ranks.

    Raises:
        CarryError: on every rank, nothing changed: state of another model or of an older version, or values that no part
            has.
    """
    state, error = None, ""
    try:
        state = _gather(engine, parts)
    except CarryError as problem:
        error = str(problem)
    errors: list[str] = [""] * runtime.world_size
    dist.all_gather_object(errors, error, group=runtime.cpu_group)
    if any(errors):
        raise CarryError(next(text for text in errors if text))
    assert state is not None
    engine.zero.load_state_dict(state)


def _gather(engine: TrainingEngine, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This rank's state in host memory, of what ``parts`` hold."""
    for part in parts:
        if "spans" not in part:
            raise CarryError("it was written by a version of rl3d whose state can be read in its own layout only")
        if part["model"] != _model(engine):
            raise CarryError(f"it is of another model: {part['model']}; this run trains {_model(engine)}")
    spans, masters = named_spans(engine), engine.zero.master_partitions()
    specs = _specs(engine, _padded_vocab(engine))
    tp = (engine.groups.tp_size, engine.groups.tp_rank)
    sources = list(_sources(engine, parts))

    def gather(key: str) -> list[Tensor]:
        out = [torch.zeros(master.numel(), dtype=torch.float32) for master in masters]
        for flat, held in zip(out, spans, strict=True):
            for name, start, stop, at in held:
                whole = flat[at : at + stop - start].fill_(torch.nan)
                real, pads = _boxes(specs[name], tp, start, stop)
                for pad in pads:
                    _view(whole, pad, pad).zero_()
                for source, boxes in sources:
                    for index, theirs in boxes.get(name, ()):
                        _copy(whole, real, source[key][index], theirs)
                if bool(whole.isnan().any()):
                    raise CarryError(f"{name}: elements {start} to {stop} of {key} are in none of the {len(parts)} parts")
        return out

    adam: list[dict[str, Tensor]] = [{} for _ in masters]
    for key, value in next((s for part in parts for s in part["adam"] if s), {}).items():
        values = gather(key) if value.dim() else [value] * len(masters)
        for state, mine in zip(adam, values, strict=True):
            state[key] = mine
    return {"master": gather("master"), "adam": adam}


def named_spans(engine: TrainingEngine) -> _Spans:
    """What this rank's master partitions hold, by canonical name."""
    names = {id(p): name for name, p in canonical_parameters(engine.model, engine.arch, engine.groups).items()}
    return [[(names[id(s.parameter)], s.start, s.stop, s.at) for s in group] for group in engine.zero.spans()]


def _padded_vocab(engine: TrainingEngine) -> int:
    return model_chunks(engine.model)[0].vocab_size


def _model(engine: TrainingEngine) -> str:
    """Tells models of other parameters apart, and says a little about them."""
    arch = engine.arch
    shapes = repr([(spec.name, spec.shape) for spec in parameter_specs(arch, arch.vocab_size)])
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
    return f"{arch.family}, {arch.num_layers} layers of {arch.hidden_size}, {arch.num_parameters} parameters, {digest}"


def _specs(engine: TrainingEngine, padded_vocab: int) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in parameter_specs(engine.arch, padded_vocab)}


def _boxes(spec: ParamSpec, tp: Sequence[int], start: int, stop: int) -> tuple[Sequence[Holding], Sequence[Holding]]:
    """Real boxes and padding of elements ``start`` to ``stop`` of a shard, in a tensor that holds only these."""
    shard = Cell(tp[0], 0 if spec.dim is None else tp[1], start, stop, stop - start, ()).shard(spec)
    return shard.holdings, shard.pads


def _sources(engine: TrainingEngine, parts: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, list[Tensor]], dict]]:
    """For each part that has something of use: its flat tensors by key, and by parameter (index of one, boxes in it)."""
    wanted = {name for group in named_spans(engine) for name, *_ in group}
    seen: set[tuple[str, int, int, int]] = set()
    for part in parts:
        specs = _specs(engine, part["padded_vocab"])
        boxes: dict[str, list[tuple[int, list[Holding]]]] = {}
        for index, group in enumerate(part["spans"]):
            for name, start, stop, at in group:
                slot = 0 if specs[name].dim is None else part["tp"][1]
                if name not in wanted or (name, slot, start, stop) in seen:  # another replica of the same
                    continue
                seen.add((name, slot, start, stop))
                real = [h._replace(offset=h.offset + at) for h in _boxes(specs[name], part["tp"], start, stop)[0]]
                boxes.setdefault(name, []).append((index, real))
        if boxes:
            keys = {key for state in part["adam"] for key, value in state.items() if value.dim()}
            flat = {key: [state[key].reshape(-1) for state in part["adam"]] for key in keys}
            yield {"master": [m.reshape(-1) for m in part["master"]], **flat}, boxes


def _copy(dst: Tensor, mine: Sequence[Holding], src: Tensor, theirs: Sequence[Holding]) -> None:
    for a in mine:
        for b in theirs:
            common = a.box.intersect(b.box)
            if common is not None:
                part = Holding(common, a.locate(common), a.pitch)
                _view(dst, part, a).copy_(_view(src, Holding(common, b.locate(common), b.pitch), b))


def _view(flat: Tensor, part: Holding, whole: Holding) -> Tensor:
    shape = (part.box.rows, part.box.cols)
    return flat.as_strided(shape, (whole.pitch, 1), flat.storage_offset() + part.offset)
