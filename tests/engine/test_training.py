"""Training in every layout against one process of Hugging Face and torch."""

import pytest
import torch
import transformers

from tests.ranks import run_ranks
from tests.reference import save_llama, train_reference

LAYOUTS = [(2, 2), (2, 1), (1, 2)]  # (tp, pp) on four ranks; dp follows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("training")
    for tied in (False, True):
        save_llama(root / ("tied" if tied else "untied"), tied)
    facts = run_ranks(
        "tests.engine.rank_checks:main", 4,
        {"directory": str(root), "out": str(root / "out"), "layouts": LAYOUTS, "dtypes": ["float32", "bfloat16"]},
    )  # fmt: skip
    return root / "out", facts["rows"], facts["logprobs"]


@pytest.fixture(scope="module")
def reference():
    return {tied: train_reference(tied) for tied in (False, True)}


def _weights(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def test_three_steps_equal_one_process_in_fp32(trained, reference):
    out, rows, _ = trained
    checked = [row for row in rows if row["dtype"] == "float32"]
    assert len(checked) == 2 * len(LAYOUTS)
    for row in checked:
        expected, norms = reference[row["tied"]]
        found = _weights(out / row["name"])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = (found[name] - value).abs().max() / value.abs().max()
            assert error < 1e-5, (row["name"], name, float(error))
        assert row["norms"] == pytest.approx(norms, rel=1e-5), row["name"]


def test_copies_of_a_shard_stay_bit_equal(trained):
    for row in trained[1]:
        assert row["replicas"] == 0.0, row["name"]


def test_bf16_with_fp32_master_follows_fp32(trained, reference):
    """bf16 rounds each weight to 8 bits: L2 within 1e-2 of fp32, and the steps must be there (not the initial weights)."""
    out, rows, _ = trained
    for row in (r for r in rows if r["dtype"] == "bfloat16"):
        expected, norms = reference[row["tied"]]
        found = _weights(out / row["name"])
        flat = torch.cat([v.flatten() for v in expected.values()])
        got = torch.cat([found[k].flatten() for k in expected])
        assert (got - flat).norm() / flat.norm() < 1e-2, row["name"]
        assert row["norms"] == pytest.approx(norms, rel=2e-2), row["name"]


def test_vocabulary_over_four_ranks_equals_torch_in_float64(trained):
    for name, error in trained[2].items():
        assert error < 2e-6, name
