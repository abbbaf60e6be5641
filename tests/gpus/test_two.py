"""Two ranks, on a CPU or on two GPUs through NCCL and CUDA IPC:

RL3D_TEST_DEVICE=cuda pytest -m slow tests/gpus

Both on one GPU: RL3D_SHARE_GPU=1, and NCCL 2.30 or newer.
"""

import itertools
import os

import pytest
import torch

from tests.engine.table import run_cases
from tests.gpus.checks import NEW, PROMPTS
from tests.ranks import DEVICE, run_ranks
from tests.reference import hf_greedy, hf_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.device_count() < 2 and os.environ.get("RL3D_SHARE_GPU") != "1",
        reason="needs two GPUs, or RL3D_SHARE_GPU=1 and NCCL 2.30",
    ),
]

LAYOUTS = (("tp2.pp1.zero1", "tp2"), ("tp1.pp2.zero1", "tp2"), ("tp1.pp1.zero3", "tp2"), ("tp2.pp1.zero1", "tp1"),
           ("tp1.pp1.zero2", "tp1"))  # fmt: skip
PAIRS = [
    *((train, gen, {"transport": transport}) for train, gen in LAYOUTS for transport in ("peer", "p2p")),
    ("tp1.pp1.zero1", "tp2", {"defer_gather": True}),
]


def test_three_steps_equal_one_process_in_fp32(tmp_path):
    cases = [
        {"tp": tp, "pp": pp, "zero": zero, "tied": tied, "sp": sp, "recompute": recompute}
        for (tp, pp), stages in (((2, 1), range(4)), ((1, 1), range(4)), ((1, 2), range(3)))
        for zero, tied, sp, recompute in itertools.product(stages, (False, True), (False, True)[:tp], ("none", "full"))
    ]
    rows = run_cases(tmp_path, 2, cases, timeout=500)
    for layout in dict.fromkeys(row["name"].split("-")[0] for row in rows):
        mine = [row for row in rows if row["name"].split("-")[0] == layout]
        print(f"\nTABLE {layout}: {len(mine)} cases, weights {max(r['error'] for r in mine):.1e}, gradient norm "
              f"{max(r['norm_error'] for r in mine):.1e}")  # fmt: skip
    assert len(rows) == len(cases)
    for row in rows:
        assert row["error"] < 1e-5 and row["norm_error"] < 1e-5 and row["replicas"] == 0.0, row


def test_bf16_follows_one_process(tmp_path):
    cases = [{"tp": tp, "pp": pp, "zero": zero, "dtype": "bfloat16"} for tp, pp, zero in ((2, 1, 1), (1, 1, 2), (1, 2, 1))]
    for row in run_cases(tmp_path, 2, cases, timeout=300):
        print(f"\nBF16 {row['name']}: L2 {row['l2']:.1e}, largest of a tensor {row['error']:.1e}")
        assert row["l2"] < 1e-2 and row["moved"] > 3 * row["l2"], row


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("actors")
    hf_llama(tied=False).save_pretrained(root / "untied")
    return root, run_ranks("tests.gpus.checks:main", 2, {"directory": str(root), "pairs": PAIRS}, timeout=400)


def test_greedy_equals_transformers_on_each_version_of_the_weights(found):
    from transformers import AutoModelForCausalLM

    root, rows = found
    for (train, gen, options), row in zip(PAIRS, rows, strict=True):
        distinct = set()
        for trip, tokens in enumerate(row["tokens"]):
            model = AutoModelForCausalLM.from_pretrained(root / f"{train}-{gen}-{trip}", dtype=torch.float32).eval()
            for prompt, answer in zip(PROMPTS, tokens, strict=True):
                assert answer == hf_greedy(model, prompt, NEW), (train, gen, options, trip)
            distinct.add(str(tokens))
        assert len(distinct) == 3, "updates change what is generated"


def test_every_switch_was_verified_and_took_the_transport_asked_for(found):
    for (train, gen, options), row in zip(PAIRS, found[1], strict=True):
        print(f"\n{train} -> {gen} {options}: {row['transports']}, {row['graphs']} graphs, {row['verified']} verified")
        assert min(row["verified"]) > 0
        if DEVICE == "cuda":
            assert row["graphs"] > 0, "decoding was captured, the all-reduce with it"
