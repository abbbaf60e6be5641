"""Strided copies against element-by-element indexing: every byte of the target memory, also those between the boxes."""

import torch

from rl3d.kernels import CopyTable

# rows, columns, pitch at the source, pitch at the target: whole rows, slices, one row, one column, tiles that do not fill
BOXES = ((1, 1, 1, 1), (3, 5, 5, 5), (7, 16, 48, 16), (70, 24, 24, 40), (2, 9000, 9000, 9008), (130, 1, 3, 2),
         (1, 20000, 20000, 20000), (5, 1028, 2048, 1028), (9, 6, 6, 17))  # fmt: skip


def main(device: str) -> dict[str, float]:
    """Bytes that differ for each dtype and alignment, and for sources of one dimension."""
    out = {}
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for shift in (0, 1):  # whether boxes begin where a GPU loads 16 bytes at once
            name = f"copy/{str(dtype).removeprefix('torch.')}/{shift}"
            out[f"{name}/strided"] = float(_differing(dtype, shift, device))
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(100, generator=generator).to(device)
    target = torch.zeros(200, device=device)
    table = CopyTable([(target[3:53], source[50:]), (target[60:60], source[:0])], target.device)
    table.run()
    assert len(table) == 1 and table.nbytes == 200
    source.neg_()  # what a table copies is what is there when it runs
    table.run()
    out["copy/flat"] = float((target.cpu() != torch.cat([torch.zeros(3), source[50:].cpu(), torch.zeros(147)])).sum())
    return out


def _differing(dtype: torch.dtype, shift: int, device: str) -> int:
    generator = torch.Generator().manual_seed(1)
    sizes = [[(rows - 1) * pitch + columns for pitch in pitches] for rows, columns, *pitches in BOXES]
    memories = []
    for side in (0, 1):
        nbytes = (sum(size[side] + 40 for size in sizes) + 1) * dtype.itemsize
        memories.append(torch.randint(0, 250, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype))
    expected, (source, target) = memories[1].clone(), [m.to(device) for m in memories]
    at, pairs = [shift, 0], []
    for (rows, columns, *pitches), size in zip(BOXES, sizes, strict=True):
        for row in range(rows):
            for part in range(0, columns, 4096):
                width = min(4096, columns - part)
                places = [at[side] + row * pitches[side] + part for side in (0, 1)]
                expected[places[1] : places[1] + width] = memories[0][places[0] : places[0] + width]
        views = [memory.as_strided((rows, columns), (pitches[side], 1), at[side])
                 for side, memory in ((0, source), (1, target))]  # fmt: skip
        pairs.append((views[1], views[0]))
        at = [at[side] + -(-size[side] // 16) * 16 for side in (0, 1)]
    CopyTable(pairs, target.device).run()
    return int((target.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
