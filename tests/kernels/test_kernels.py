"""Both paths of every kernel against float64: torch on the CPU, and Triton's interpreter in a process of its own; and that
the kernels compile for a GPU, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl3d.kernels import CopyTable, logprob_statistics
from rl3d.kernels.strided_copy import units_of
from tests.kernels.checks import main

# rounding of the inputs' own dtype; a wrong formula is off by orders of magnitude
LIMITS = {"norm_gemv_glu/bfloat16": 5e-2, "float32": 5e-6, "bfloat16": 2e-2}


def _check(errors):
    assert len(errors) > 20
    for name, error in errors.items():
        assert error < next((limit for kind, limit in LIMITS.items() if kind in name), 5e-6), (name, error)


def test_torch_path():
    _check(main("cpu"))


def test_triton_kernels_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.kernels.checks", "cpu"], env=env, cwd=root, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"], "the interpreter was on"
    _check(found["errors"])


@pytest.mark.parametrize(
    "capability", [pytest.param("80", marks=pytest.mark.slow), "90", pytest.param("100", marks=pytest.mark.slow)]
)
def test_every_kernel_compiles_for_a_gpu(capability):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_checks", capability], cwd=root,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
                          timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["kernels"]) > 20 and found["missing"] == [], "add the kernel to compile_checks"


def test_statistics_survive_extreme_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    top, total, weighted, chosen = logprob_statistics(logits, torch.tensor([0, 2]), 3, 1.0).unbind(1)
    assert top.tolist() == [1e4, -1e4] and total.tolist() == [1.0, 3.0]
    assert weighted.tolist() == [0.0, 0.0] and chosen.tolist() == [1e4, -1e4]


def test_copies_are_as_wide_as_every_address_and_pitch_allows():
    aligned = [4096, 1 << 40, 7, 64, 128, 256]
    for column, value, expected in ((0, 4096, (8, 2)), (0, 4104, (8, 1)), (1, 4098, (2, 1)), (1, 4097, (1, 1)),
                                    (2, 3, (8, 2)), (3, 72, (8, 1)), (3, 66, (2, 1)), (4, 129, (1, 1)),
                                    (5, 260, (2, 1))):  # fmt: skip
        box = [*aligned[:column], value, *aligned[column + 1 :]]
        unit, align = units_of(np.array([aligned, box]))
        assert (unit[0], align[0]) == (8, 2) and (unit[1], align[1]) == expected, (column, value)


def test_copies_that_do_not_fit_are_named():
    cpu, box = torch.device("cpu"), torch.zeros(4, 6)
    for pair, words in (
        ((box, torch.zeros(6, 4)), "same dtype and the same shape"),
        ((box, box.bfloat16()), "same dtype and the same shape"),
        ((box, torch.zeros(6, 4).t()), "expected contiguous rows"),
    ):
        with pytest.raises(ValueError, match=words):
            CopyTable([pair], cpu)
