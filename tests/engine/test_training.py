"""Training in every layout against one process of Hugging Face and torch: a choice of cases in which each stage meets
each layout and each option of memory. ``test_training_table.py`` has all of them."""

import pytest

from tests.engine.cases import BUCKET
from tests.engine.table import run_cases

# (tp, pp) on four ranks; dp follows
CASES = (
    {"tp": 2, "pp": 1, "zero": 0, "sp": True},
    {"tp": 2, "pp": 1, "zero": 1, "tied": True, "packed": False, "sp": True, "recompute": "full"},
    {"tp": 2, "pp": 1, "zero": 2, "offload": "optimizer"},
    {"tp": 2, "pp": 1, "zero": 2, "tied": True, "sp": True, "recompute": "full"},
    {"tp": 2, "pp": 1, "zero": 3, "tied": True, "sp": True, "recompute": "full", "packed": False},
    {"tp": 2, "pp": 1, "zero": 3, "offload": "params"},
    {"tp": 1, "pp": 1, "zero": 0, "tied": True},
    {"tp": 1, "pp": 1, "zero": 1, "recompute": "selective"},
    {"tp": 1, "pp": 1, "zero": 2, "tied": True, "recompute": "full"},
    {"tp": 1, "pp": 1, "zero": 3, "recompute": "selective"},
    {"tp": 1, "pp": 2, "zero": 0, "packed": False},
    {"tp": 1, "pp": 2, "zero": 1, "tied": True, "offload": "optimizer"},
    {"tp": 1, "pp": 2, "zero": 2, "tied": True, "recompute": "full"},
    {"tp": 2, "pp": 2, "zero": 0, "tied": True},
    {"tp": 2, "pp": 2, "zero": 1, "tied": True, "sp": True, "recompute": "selective"},
    {"tp": 2, "pp": 2, "zero": 2, "sp": True},
    {"tp": 2, "pp": 2, "zero": 1, "model": "qwen3", "sp": True},  # norms of queries and keys
    {"tp": 2, "pp": 1, "zero": 3, "model": "qwen3"},
    {"tp": 2, "pp": 1, "zero": 0, "tied": True, "dtype": "bfloat16"},
    {"tp": 2, "pp": 1, "zero": 1, "dtype": "bfloat16", "offload": "optimizer"},
    {"tp": 1, "pp": 2, "zero": 1, "tied": True, "dtype": "bfloat16"},
    {"tp": 1, "pp": 1, "zero": 2, "tied": True, "dtype": "bfloat16"},
    {"tp": 2, "pp": 1, "zero": 2, "dtype": "bfloat16", "sp": True, "offload": "optimizer"},
    {"tp": 2, "pp": 1, "zero": 3, "tied": True, "dtype": "bfloat16", "sp": True},
    {"tp": 1, "pp": 1, "zero": 3, "dtype": "bfloat16", "offload": "params"},
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("training"), 4, CASES, target="main")


def _rows(facts, dtype):
    rows = [row for row in facts["rows"] if row["dtype"] == dtype]
    assert len(rows) == len([c for c in CASES if c.get("dtype", "float32") == dtype])
    return rows


def test_three_steps_equal_one_process_in_fp32(facts):
    for row in _rows(facts, "float32"):
        assert row["error"] < 1e-5, row
        assert row["norm_error"] < 1e-5, row


def test_three_steps_follow_one_process_in_bf16(facts):
    """Sums in another order round differently to 8 bits: L2 of the weights within 1e-2 of the single-process bf16 run."""
    for row in _rows(facts, "bfloat16"):
        assert row["l2"] < 1e-2, row
        assert row["norm_error"] < 2e-2, row
        assert row["moved"] > 3 * row["l2"], "the steps must be there, not the initial weights"


def test_a_gradient_that_is_not_finite_is_skipped_by_all_and_leaves_no_trace(facts):
    """On one rank, before the third step; that the third step equals the reference's shows that nothing is left of it."""
    assert all(row["skipped"] for row in facts["rows"])


def test_copies_of_a_shard_stay_bit_equal(facts):
    for row in facts["rows"]:
        assert row["replicas"] == 0.0, row["name"]


def test_gradients_are_sharded_at_stages_2_and_3(facts):
    """Most bytes of fp32 gradients that a rank ever held: everything at stage 1; at stages 2 and 3 its part, the buckets
    on their way and the gradient that has just appeared."""
    seen = set()
    for case, row in zip(CASES, facts["rows"], strict=True):
        whole, dp = 4 * row["parameters"], 4 // case["tp"] // case["pp"]
        if case.get("dtype") == "bfloat16" or "offload" in case or dp == 1:
            continue
        seen.add((case["zero"], case["pp"]))
        if case["zero"] <= 1 or case["pp"] > 1:
            assert row["gradient_bytes"] >= whole, row
        else:
            transient = 4 * BUCKET + 2 * 4 * row["largest"]
            assert whole / dp <= row["gradient_bytes"] <= 1.05 * whole / dp + transient, row
    assert {(1, 1), (2, 1), (3, 1), (2, 2)} <= seen


def test_vocabulary_over_four_ranks_equals_torch_in_float64(facts):
    for name, error in facts["logprobs"].items():
        assert error < 2e-6, name
