"""Tensors that wait in host memory or nowhere, and stages that are taken back, in one process."""

import pytest
import torch

from rl3d.engine.residency import Residency
from rl3d.engine.transaction import Transaction
from rl3d.engine.verification import NonFiniteWeightsError, check_finite, check_level, chosen
from tests.reshard.models import llama


def _tensors():
    flat = torch.arange(24.0)
    return flat, [flat[:8].view(2, 4), flat[8:], torch.full((5,), 7, dtype=torch.bfloat16)]


def test_host_buffers_are_used_again_and_written_only_after_a_change():
    flat, tensors = _tensors()
    version = 0
    place = Residency(lambda: tensors, "host", changed=lambda: version, at_once=False)
    size = 24 * 4 + 5 * 2
    assert not place.away and place.host_bytes == 0
    assert place.leave() == size and place.away and flat.untyped_storage().nbytes() == 0
    assert place.leave() == 0 and place.copied_bytes == place.host_bytes == size
    buffers = [buffer.data_ptr() for _, buffer, _ in place._buffers.values()]
    assert place.come() == size and place.come() == 0
    assert flat.tolist() == list(range(24)) and tensors[2].tolist() == [7] * 5
    place.leave(), place.come()
    assert place.copied_bytes == size, "nothing had changed"
    tensors[1].add_(1)
    version += 1
    tensors.append(torch.ones(3))  # an optimiser's state appears with its first step
    place.leave(), place.come()
    assert flat[8:].tolist() == list(range(9, 25)) and tensors[3].tolist() == [1, 1, 1]
    assert place.copied_bytes == 2 * size + 12
    assert [b.data_ptr() for _, b, _ in place._buffers.values()][:2] == buffers


def test_what_is_dropped_comes_back_as_zeros_and_nothing_leaves_while_in_use():
    flat, tensors = _tensors()
    place = Residency(lambda: tensors, "drop", at_once=False)
    with place.resident():
        assert place.leave() == 0 and flat[3] == 3
    assert place.away and place.host_bytes == 0
    place.come()
    assert not flat.any() and flat.untyped_storage().nbytes() == 96


def test_memory_that_does_not_suffice_leaves_everything_away():
    flat, tensors = _tensors()
    place = Residency(lambda: tensors, "host")
    storage = place._parked[-1][0]

    class Full:
        """A storage that cannot be had now."""

        def __init__(self):
            self.allowed = False

        def __getattr__(self, name):
            return getattr(storage, name)

        def resize_(self, size):
            if size and not self.allowed:
                raise torch.OutOfMemoryError("full")
            storage.resize_(size)

    full = Full()
    parked = place._parked
    place._parked = [*parked[:-1], (full, parked[-1][1])]
    with pytest.raises(torch.OutOfMemoryError):
        place.come()
    assert place.away and flat.untyped_storage().nbytes() == 0
    place._parked = parked
    place.come()
    assert flat.tolist() == list(range(24))


def test_stages_are_taken_back_in_reverse_the_failed_one_included():
    done = []
    switch = Transaction("the switch", None, 0, torch.device("cpu"))
    assert switch.stage("one", lambda: 1, lambda: done.append("one back")) == 1

    def fail():
        done.append("two")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        switch.stage("two", fail, lambda: done.append("two back"), together=True)
    assert done == ["two", "two back", "one back"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_named_and_counted(value, dtype):
    weights = {name: torch.randn(4, 3).to(dtype) for name in "abc"}
    weights["empty"] = torch.empty(0, dtype=dtype)
    check_finite(weights, 5)
    weights["b"][1, 2] = weights["b"][3, 0] = value
    with pytest.raises(NonFiniteWeightsError, match=r"rank 5.*b \(2 of 12 values\)"):
        check_finite(weights, 5)
    check_finite({"huge": torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)}, 0)


def test_levels_of_verification():
    specs = llama(12, 16, 24, 19, 24)
    assert chosen(specs, "off", 3) == [] and chosen(specs, "full", 3) == specs
    seen = [spec.name for turn in range(16) for spec in chosen(specs, "sampled", turn)]
    assert sorted(seen) == sorted(s.name for s in specs) and len(specs) > 32, "each once in sixteen switches"
    assert [check_level(level) for level in (True, False, "sampled")] == ["full", "off", "sampled"]
    with pytest.raises(ValueError, match="verify = 'most'.*off, sampled, full"):
        check_level("most")
