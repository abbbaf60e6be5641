"""The memory of the generation weights: one allocation whose addresses stay, and training weights used as they lie."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from rl3d.layout import Holding, ParamSpec, ShardLayout

ALIGN = 256
"""Bytes; kernels read vectors, and peers map whole tensors."""


class Arena:
    """One storage for all generation weights of a rank.

    Views keep their place in it when it is given back and allocated again; their addresses then differ, and ``epoch`` with
    them. Whoever keeps addresses (captured graphs) compares it.

    Attributes:
        exported: peers have mapped it: from now on it is never given back.
    """

    def __init__(self, device: torch.device):
        self.device, self.epoch, self.exported = device, 0, False
        self._storage = torch.UntypedStorage(0, device=device)
        self._needed = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return self._storage.nbytes()

    def place(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views with the shapes and dtypes of ``like``, one behind the other from the start, all zero.

        A second call gives views of the same memory: of several layouts one at a time is in use.
        """
        starts, end = [], 0
        for tensor in like.values():
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        self._needed = max(self._needed, end)
        if self.exported and self.nbytes < self._needed:  # views of the old one keep it alive
            self._storage = torch.UntypedStorage(0, device=self.device)
        self.reserve()
        views = {}
        for (name, tensor), start in zip(like.items(), starts, strict=True):
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            shape = tuple(tensor.shape)
            stride = torch.empty(shape, device="meta").stride()
            views[name] = empty.set_(self._storage, start // tensor.element_size(), shape, stride)
        return views

    def reserve(self) -> int:
        """Have the memory; the bytes that were allocated for it now."""
        if self._storage.nbytes() >= self._needed:
            return 0
        self._storage.resize_(0)  # nothing in it is wanted: a resize would copy it
        self._storage.resize_(self._needed)
        torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage).zero_()
        self.epoch += 1
        return self._needed

    def release(self) -> int:
        """Give the memory back, unless peers have mapped it; the bytes. No graph may be replayed from now on."""
        freed = 0 if self.exported else self._storage.nbytes()
        if freed:
            self._storage.resize_(0)
            self.epoch += 1
        return freed


def alias_offset(spec: ParamSpec, source: ShardLayout, target: ShardLayout, rank: int) -> int | None:
    """Where in ``rank``'s local tensor of the source layout its whole local tensor of the target layout lies as one
    contiguous piece: the element it starts with. ``None`` where it does not, or the source is cut into flat parts.

    Gate and up, for one, are a piece only where both layouts cut alike; rows of a column-parallel weight always are.
    """
    if source.parts is not None or source.flat is not None:
        return None
    if not (source.holds(spec, rank) and target.holds(spec, rank)):
        return None
    held = _places(spec, source, rank)
    shift: int | None = None
    for pad, found in _places(spec, target, rank):
        start = next((h.locate(found.box) for p, h in held if p == pad and h.box.contains(found.box)), None)
        pitch = next((h.pitch for p, h in held if p == pad and h.box.contains(found.box)), None)
        if start is None or (pitch != found.pitch and found.box.rows > 1):
            return None
        if shift is not None and start - found.offset != shift:
            return None
        shift = start - found.offset
    return shift


def _places(spec: ParamSpec, layout: ShardLayout, rank: int) -> list[tuple[bool, Holding]]:
    """(is padding, box) of everything in the local tensor."""
    mine = [shard for shard in layout.shards(spec) if rank in shard.ranks]
    return [(pad, h) for shard in mine for pad, group in ((False, shard.holdings), (True, shard.pads)) for h in group]


def alias_weights(specs: Sequence[ParamSpec], source: ShardLayout, target: ShardLayout, rank: int,
                  weights: Mapping[str, Tensor]) -> dict[str, Tensor]:  # fmt: skip
    """The generation weights that are training weights as they lie: name -> view of the training tensor."""
    views = {}
    for spec in specs:
        offset = alias_offset(spec, source, target, rank)
        if offset is not None and (tensor := weights[spec.name]).is_contiguous():
            shape = target.local_shape(spec)
            stride = torch.empty(shape, device="meta").stride()
            views[spec.name] = tensor.detach().as_strided(shape, stride, tensor.storage_offset() + offset)
    return views


def house(parameters: Mapping[str, Parameter], arena: Arena, aliases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rest the parameters of a model whose weights are not set yet in ``aliases`` and, all others, in the arena.

    Their own memory is given back first, so that nothing is there twice.

    Returns:
        name -> the memory of each.
    """
    like = {name: torch.empty_like(p, device="meta") for name, p in parameters.items() if name not in aliases}
    for parameter in parameters.values():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if arena.device.type == "cuda":
        torch.cuda.empty_cache()
    views = {**arena.place(like), **aliases}
    for name, parameter in parameters.items():
        parameter.data = views[name]
    return {name: views[name] for name in parameters}
