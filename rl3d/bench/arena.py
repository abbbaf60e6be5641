"""Weights of a layout in one piece of memory, filled with random values that are the same in every layout."""

from collections.abc import Sequence

import torch

from rl3d.layout import ParamSpec, ShardLayout, matrix_shape

ALIGN = 256


class Arena:
    """All local tensors of one rank under one layout: ``weights``, views of ``bytes``."""

    def __init__(self, specs: Sequence[ParamSpec], layout: ShardLayout, rank: int, device: torch.device) -> None:
        self.layout, self.rank = layout, rank
        mine, starts, end = _places(specs, layout, rank)
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self.bytes.share_memory_()  # where peers can map it from the start
        self.weights: dict[str, torch.Tensor] = {}
        for spec, start in zip(mine, starts, strict=True):
            shape, dtype = layout.local_shape(spec), getattr(torch, spec.dtype)
            part = self.bytes[start : start + torch.Size(shape).numel() * dtype.itemsize]
            self.weights[spec.name] = part.view(dtype).view(shape)

    def fill(self, specs: Sequence[ParamSpec]) -> None:
        """Random finite values, the same for a parameter wherever it is."""
        device = self.bytes.device
        holdings = self.layout.holdings(self.rank, specs)
        for index, spec in enumerate(specs):
            if spec.name in holdings:
                whole = _random(spec, index, device)
                for box, offset, pitch in holdings[spec.name]:
                    place(self.weights[spec.name], offset, pitch, box.rows, box.cols).copy_(
                        whole[box.row : box.row + box.rows, box.col : box.col + box.cols]
                    )

    def poison(self) -> None:
        """Ones in every bit: not a number in any floating type."""
        self.bytes.fill_(255)


def arena_bytes(specs: Sequence[ParamSpec], layout: ShardLayout, rank: int) -> int:
    """Bytes that an :class:`Arena` takes."""
    return _places(specs, layout, rank)[2]


def filling_bytes(specs: Sequence[ParamSpec]) -> int:
    """Bytes that :meth:`Arena.fill` takes for a moment: random words of the largest parameter, and its bits."""
    return 4 * max(torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize for spec in specs)


def _places(specs: Sequence[ParamSpec], layout: ShardLayout, rank: int) -> tuple[list[ParamSpec], list[int], int]:
    mine = [spec for spec in specs if layout.holds(spec, rank)]
    starts, end = [], 0
    for spec in mine:
        starts.append(end)
        numel = torch.Size(layout.local_shape(spec)).numel()
        end += -(-numel * getattr(torch, spec.dtype).itemsize // ALIGN) * ALIGN
    return mine, starts, end


def place(tensor: torch.Tensor, offset: int, pitch: int, rows: int, cols: int) -> torch.Tensor:
    """The box at a flat position of a contiguous tensor."""
    return tensor.as_strided((rows, cols), (pitch, 1), tensor.storage_offset() + offset)


def _random(spec: ParamSpec, seed: int, device: torch.device) -> torch.Tensor:
    rows, cols = matrix_shape(spec.shape)
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (rows * cols // 4 + 1,), generator=generator, device=device)
    bits = words.view(torch.int16)[: rows * cols] & ~0x4000  # no exponent of all ones
    return bits.view(torch.bfloat16).view(rows, cols)
