"""Training in every layout against one process of Hugging Face and torch."""

import itertools

import pytest
import torch

from tests.ranks import run_ranks
from tests.reference import save_llama, train_reference

STAGES = {(2, 1): (0, 1, 2, 3), (1, 1): (2, 3), (2, 2): (0, 1, 2), (1, 2): (1,)}  # (tp, pp) on four ranks; dp follows


def _cases():
    for (tp, pp), stages in STAGES.items():
        for zero, tied, packed in itertools.product(stages, (False, True), (True,)):
            yield {"tp": tp, "pp": pp, "zero": zero, "tied": tied, "packed": packed}
    for tp, pp, zero in ((2, 1, 0), (2, 1, 1), (2, 2, 1), (2, 2, 2), (1, 1, 2), (2, 1, 3)):
        yield {"tp": tp, "pp": pp, "zero": zero, "tied": True, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    root = tmp_path_factory.mktemp("training")
    for tied in (False, True):
        name = "tied" if tied else "untied"
        save_llama(root / name, tied)
        torch.save(train_reference(tied), root / f"{name}.pt")
    return run_ranks("tests.engine.rank_checks:main", 4, {"directory": str(root), "cases": list(_cases())}, timeout=240)


@pytest.fixture(scope="module")
def rows(facts):
    return facts["rows"]


def test_three_steps_equal_one_process_in_fp32(rows):
    checked = [row for row in rows if row["dtype"] == "float32"]
    assert len(checked) == 20
    for row in checked:
        assert row["error"] < 1e-5, row
        assert row["norm_error"] < 1e-5, row


def test_copies_of_a_shard_stay_bit_equal(rows):
    for row in rows:
        assert row["replicas"] == 0.0, row["name"]


def test_bf16_with_fp32_master_follows_fp32(rows):
    """bf16 rounds each weight to 8 bits: L2 within 1e-2 of fp32, and the steps must be there (not the initial weights)."""
    checked = [row for row in rows if row["dtype"] == "bfloat16"]
    assert len(checked) == 6
    for row in checked:
        assert row["l2"] < 1e-2, row
        assert row["norm_error"] < 2e-2, row


def test_vocabulary_over_four_ranks_equals_torch_in_float64(facts):
    for name, error in facts["logprobs"].items():
        assert error < 2e-6, name
