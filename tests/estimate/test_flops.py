"""Operations against torch's own counter on transformers' model; peaks by the names that CUDA reports."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl3d.estimate.flops import forward_flops, peak_flops, training_flops
from rl3d.models import Architecture
from tests.reference import hf_llama


def test_operations_equal_torchs_counter():
    model = hf_llama(False)
    arch, length = Architecture.from_hf(model.config), 24
    ids = torch.randint(3, 250, (1, length))
    with FlopCounterMode(display=False) as counter:
        out = model(ids).logits
        forward = counter.get_total_flops()
        out.sum().backward()
    # transformers computes the whole square of attention where it is not fused: the masked half is ours to leave out
    masked = arch.num_layers * 2 * length**2 * arch.num_heads * arch.head_dim
    assert forward_flops(arch, [length], length) + masked == pytest.approx(forward, rel=1e-3)
    assert training_flops(arch, [length], length) + 3 * masked == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_packing_adds_up_and_heads_count_for_predictions_only():
    arch = Architecture.from_hf(hf_llama(False).config)
    both = forward_flops(arch, [5, 9], 4)
    assert both == forward_flops(arch, [5], 0) + forward_flops(arch, [9], 4)
    assert forward_flops(arch, [5], 3) - forward_flops(arch, [5], 1) == 2 * 2 * arch.vocab_size * arch.hidden_size


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250), ("NVIDIA L4", 121),
    ],
)  # fmt: skip
def test_peaks(name, tflops):
    assert peak_flops(name) == tflops * 1e12


def test_an_unknown_device_has_no_peak():
    assert peak_flops("") is None and peak_flops("Some Other Card") is None
