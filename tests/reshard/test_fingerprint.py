"""What a fingerprint must see and what it must not."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl3d.layout import Box, Holding, Mesh, ParamSpec, ShardLayout
from rl3d.reshard import combine, compare, fingerprint_tensor, fold, local_fingerprints
from rl3d.reshard.fingerprint import fingerprint_boxes
from tests.reshard import oracle
from tests.reshard.models import llama

MASK = (1 << 64) - 1


def _splitmix(seed: int, position: int) -> int:
    """The published generator, in Python integers."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_fingerprint_is_the_sum_it_claims_to_be(dtype):
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = tensor.clone()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.view(integer).tolist()
    a = [_splitmix(0x6A09E667F3BCC909, r) for r in range(5)]
    b = [_splitmix(0xBB67AE8584CAA73B, c) for c in range(7)]
    expected = sum(a[r] * b[c] * bits[r][c] for r in range(5) for c in range(7)) & MASK
    assert fingerprint_tensor(tensor) == expected
    assert fingerprint_tensor(tensor, chunk_bytes=48) == expected
    assert torch.equal(tensor.view(integer), before.view(integer))


def test_sees_every_kind_of_mistake():
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    changed = x.clone()
    changed[3, 4] = -changed[3, 4]
    swapped = x.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    columns = x.clone()
    columns[:, [2, 9]] = columns[:, [9, 2]]
    wrong_cut = torch.cat([x[0:4], x[8:12], x[4:8], x[12:16]])
    variants = [x, changed, swapped, columns, wrong_cut, x.t().contiguous(), x.roll(1), torch.zeros_like(x)]
    variants += [x.float(), x.flip(0), x.flip(1), -x]
    assert len({fingerprint_tensor(v) for v in variants}) == len(variants)
    assert fingerprint_tensor(x) == fingerprint_tensor(x.clone())


def test_exchanged_tensors_are_named():
    a, b = torch.ones(4, 4), torch.full((4, 4), 2.0)
    right = {"a": fingerprint_tensor(a), "b": fingerprint_tensor(b)}
    wrong = {"a": fingerprint_tensor(b), "b": fingerprint_tensor(a)}
    assert compare(right, right) == []
    assert [line.split(":")[0] for line in compare(right, wrong)] == ["a", "b"]
    assert compare(right, {"a": right["a"], "c": 1}) == ["b: missing", "c: not expected"]
    assert fold(right) != fold(wrong) and fold(right) == fold(dict(reversed(right.items())))


def test_padding_does_not_count_and_boxes_add_up():
    x = torch.randn(10, 6)
    y = x.clone()
    y[7:] = 5
    assert fingerprint_tensor(x, 7) == fingerprint_tensor(y, 7) == fingerprint_tensor(x[:7])
    parts = [Holding(Box(0, 0, 4, 6), 0, 6), Holding(Box(4, 0, 6, 2), 24, 6), Holding(Box(4, 2, 6, 4), 26, 6)]
    assert int(fingerprint_boxes(x, parts)) & MASK == fingerprint_tensor(x)
    far = Holding(Box((1 << 20) - 3, 0, 6, 6), 0, 6)  # across the end of the kept weights
    near = [Holding(Box(far.box.row + i, 0, 1, 6), 6 * i, 6) for i in range(6)]
    assert int(fingerprint_boxes(x, [far])) == int(fingerprint_boxes(x, near))


def test_one_wrong_row_on_one_shard_is_found_and_named():
    specs = llama(2, 8, 8, 7, 8, padded_vocab=8, tied=True, dtype="float32")
    arrays = oracle.whole(specs)
    places = {r: (c["pp"], c["tp"]) for r in range(8)
              for c in [oracle.train_place({"tp": 2, "pp": 2, "dp": 2}, ("tp", "pp", "dp"), r)]}  # fmt: skip
    layout = ShardLayout.training(Mesh(2, 2, 2), 2)
    shards = {r: oracle.to_torch(specs, s) for r, s in oracle.shards(specs, arrays, places, 2, 2).items()}

    def total():
        return combine(local_fingerprints(specs, layout, rank, shards[rank]) for rank in range(8))

    before = total()
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    shards[3][name][[0, 5]] = shards[3][name][[5, 0]]
    assert [line.split(":")[0] for line in compare(before, total())] == [name]
    # The copy of a replica does not count: ownership is the lowest holder's.
    shards[7][name].zero_()
    assert [line.split(":")[0] for line in compare(before, total())] == [name]


def test_missing_tensor_is_named():
    specs = [ParamSpec("w", (4, 4), 0, layer=0)]
    with pytest.raises(KeyError, match="rank 0: parameter w is missing"):
        local_fingerprints(specs, ShardLayout.training(Mesh(1, 1, 1), 1), 0, {})


class _LargestOutput(TorchDispatchMode):
    """Largest new tensor that any operation makes, in bytes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not function.is_view:
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


def test_temporaries_stay_below_the_cap():
    x = torch.from_numpy(np.arange(1 << 20, dtype=np.int32)).view(torch.float32).view(512, 2048)
    with _LargestOutput() as seen:
        fingerprint_tensor(x, chunk_bytes=1 << 18)
    assert 1 << 16 <= seen.largest <= 1 << 18
