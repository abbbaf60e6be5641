"""Every combination of layout, ZeRO stage, tied embedding, sequence parallelism, packing and recomputation."""

import itertools

import pytest

from tests.engine.table import run_cases

RECOMPUTE = ("none", "selective", "full")


def _cases(tp, pp, stages, options=RECOMPUTE):
    parallel = (False, True) if tp > 1 else (False,)
    for zero, tied, sp, packed, recompute in itertools.product(stages, (False, True), parallel, (True, False), options):
        yield {"tp": tp, "pp": pp, "zero": zero, "tied": tied, "sp": sp, "packed": packed, "recompute": recompute}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "stages"),
    [
        *((4, 2, 1, (zero,)) for zero in range(4)),
        *((4, 1, 1, pair) for pair in ((0, 1), (2, 3))),
        (4, 1, 2, (0, 1, 2)),
        *((4, 2, 2, (zero,)) for zero in range(3)),
    ],
)
def test_every_combination_in_fp32(tmp_path, ranks, tp, pp, stages):
    cases = list(_cases(tp, pp, stages))
    rows = run_cases(tmp_path, ranks, cases, timeout=600)
    report(rows)
    assert len(rows) == len(cases)
    for row in rows:
        assert row["error"] < 1e-5 and row["norm_error"] < 1e-5 and row["replicas"] == 0.0, row


@pytest.mark.slow
def test_eight_ranks(tmp_path):
    rows = run_cases(tmp_path, 8, _cases(2, 2, (0, 1, 2), ("none",)), timeout=600)
    report(rows)
    assert len(rows) == 24
    for row in rows:
        assert row["error"] < 1e-5 and row["norm_error"] < 1e-5 and row["replicas"] == 0.0, row


def report(rows):
    """Worst error of each stage, for docs/numbers.md (pytest -s)."""
    for layout in dict.fromkeys(row["name"].split("-")[0] for row in rows):
        mine = [row for row in rows if row["name"].split("-")[0] == layout]
        worst, norm = max(row["error"] for row in mine), max(row["norm_error"] for row in mine)
        print(f"\nTABLE {layout}: {len(mine)} cases, weights {worst:.1e}, gradient norm {norm:.1e}")
