"""Predicted steps against rates measured on an H200, and against sums done by hand."""

from dataclasses import replace

import pytest

from rl3d.estimate.step import Workload, decode_step, kv_bytes_per_token, predict_step
from rl3d.estimate.topology import Topology
from rl3d.layout import GenLayout, LayoutError, TrainLayout
from rl3d.models import Architecture
from rl3d.models.shapes import shape

H200 = Topology.read("h200-8")
LLAMA, QWEN = (Architecture.from_hf(shape(name)) for name in ("llama2-7b", "qwen2.5-1.5b"))
QWEN_7B = Architecture.from_hf(shape("qwen2.5-7b"))


@pytest.mark.parametrize(
    "arch, batch, context, measured",
    [
        # a lean forward body in one CUDA graph
        (QWEN, 128, 900, 46_666), (QWEN, 256, 900, 64_376), (QWEN_7B, 128, 900, 19_382),
        # vLLM 0.26, prompt 512, 256 new tokens, decoding alone
        (LLAMA, 1, 640, 215), (LLAMA, 32, 640, 4_205), (LLAMA, 128, 640, 7_473), (LLAMA, 256, 640, 8_289),
    ],
)  # fmt: skip
def test_decoding_is_as_fast_as_measured(arch: Architecture, batch: int, context: int, measured: int) -> None:
    assert batch / decode_step(arch, 1, batch, context, H200) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("arch, batch, measured", [(QWEN, 32, 0.082), (QWEN, 256, 0.631), (LLAMA, 256, 2.838)])
def test_prefill_is_as_fast_as_measured(arch: Architecture, batch: int, measured: float) -> None:
    found = predict_step(arch, TrainLayout(), GenLayout(1), 1, H200, Workload(512, 256, batch))
    assert found.prefill == pytest.approx(measured, rel=0.15)


def test_the_cache_of_a_token() -> None:
    assert kv_bytes_per_token(LLAMA) == 2 * 32 * 4096 * 2  # keys and values, layers, hidden, bytes


def test_a_small_cache_means_waves() -> None:
    work = Workload(512, 512, sequences=64)
    room = 16 * work.length * kv_bytes_per_token(LLAMA) / 4
    one = predict_step(LLAMA, TrainLayout(4), GenLayout(4), 4, H200, work)
    four = predict_step(LLAMA, TrainLayout(4), GenLayout(4), 4, H200, work, kv_bytes=room)
    assert (one.waves, four.waves) == (1, 4)
    assert four.decode == pytest.approx(4 * 512 * decode_step(LLAMA, 4, 16, 768, H200))


def test_stages_wait_for_the_first_micro_batch() -> None:
    """Four stages, 8 micro-batches: 3/8 of the work on top; two chunks a stage halve that."""
    work = Workload(sequences=32, micro_batch=4)
    piped = predict_step(LLAMA, TrainLayout(1, 4, 1), GenLayout(1), 4, H200, work)
    chunks = predict_step(LLAMA, TrainLayout(1, 4, 1, 1, 2), GenLayout(1), 4, H200, work)
    assert piped.logprobs / (1 + 3 / 8) == pytest.approx(chunks.logprobs / (1 + 3 / 16), rel=0.02)
    assert piped.bubble == pytest.approx(3 / 8 * piped.logprobs / 2 * 3 / (1 + 3 / 8))  # of two evaluations, three passes


def test_arithmetic_alone_on_one_gpu() -> None:
    """6 x parameters x tokens at 45 % of 989 TFLOP/s is most of the update of a 1.5B model (head at response tokens)."""
    work = Workload(512, 512, 64, optimizer_steps=1)
    found = predict_step(QWEN, TrainLayout(), GenLayout(), 1, H200, work)
    ideal = 6 * QWEN.num_parameters * work.tokens / (0.45 * 989e12)
    assert found.update == pytest.approx(ideal, rel=0.1)
    assert predict_step(QWEN, TrainLayout(), GenLayout(), 1, H200, replace(work, critic=True)).update == pytest.approx(
        2 * found.update
    )
    assert predict_step(QWEN, TrainLayout(), GenLayout(), 1, H200, replace(work, recompute="full")).update == pytest.approx(
        found.update * 4 / 3, rel=0.01
    )


def test_stage_3_gathers_weights_for_every_pass() -> None:
    slow = replace(H200, inside_gb_per_s=10)
    sharded, whole = (
        predict_step(LLAMA, TrainLayout(1, 1, 8, zero), GenLayout(8), 8, slow, Workload(micro_batch=8)) for zero in (3, 1)
    )
    once = 7 / 8 * LLAMA.num_parameters * 2 / (10e9 * 0.87)
    # 8 micro-batches: 2 gathers each when training, 1 for old and 1 for reference log-probabilities, 1 reduction
    assert sharded.update - whole.update == pytest.approx((1 + 16 + 16 - 2) * once)


def test_an_optimiser_on_the_host_takes_longer() -> None:
    """Eight ranks hold 842M parameters each: 28 bytes for each at 37 GB/s, 2 down and 2 up at 25 GB/s."""
    device, host = (
        predict_step(LLAMA, TrainLayout(1, 1, 8, 3), GenLayout(8), 8, H200, Workload(offload=offload))
        for offload in ("none", "optimizer")
    )
    part = LLAMA.num_parameters / 8
    assert host.update - device.update == pytest.approx(part * (28 / 37e9 + 4 / 25e9 - 28 / 4800e9))


def test_a_ring_over_nodes_shares_their_cards() -> None:
    inside, across = (
        predict_step(LLAMA, TrainLayout(8, 1, 2), GenLayout(8), 16, topology, Workload())
        for topology in (replace(H200, gpus_per_node=16, nics_per_node=16), H200)
    )
    local = LLAMA.num_parameters / 8 * 2
    assert across.update - inside.update == pytest.approx(local * (1 / 50e9 - 1 / 343e9) / 0.87)


def test_layouts_must_fit_the_gpus() -> None:
    with pytest.raises(LayoutError, match="6 ranks do not divide by tp x pp = 4"):
        predict_step(LLAMA, TrainLayout(4), GenLayout(1), 6, H200, Workload())
