"""Tables of boxes say what the shards say; intersections are those of sets of elements."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl3d.layout import Mesh, ShardLayout
from rl3d.reshard.boxes import boxes_of, meet
from tests.reshard.models import llama
from tests.reshard.test_plan_random import cases


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_tables_equal_shards(case):
    for half in case["halves"]:
        for spec in case["specs"]:
            real, pads = boxes_of(spec, half.layout.cells(spec))
            for index, shard in enumerate(half.layout.shards(spec)):
                for table, holdings in ((real, shard.holdings), (pads, shard.pads)):
                    mine = sorted(tuple(line[1:]) for line in table.tolist() if line[0] == index)
                    assert mine == sorted((*h.box, h.offset, h.pitch) for h in holdings)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 4]), st.integers(0, 6))
def test_meetings_are_common_elements(tp, dp, which):
    spec = llama(1, 12, 12, 12, 12)[which]
    layouts = ShardLayout.training(Mesh(tp, 1, dp), 1, zero=3), ShardLayout.training(Mesh(dp, 1, tp), 1, zero=3)
    tables = [boxes_of(spec, layout.cells(spec))[0] for layout in layouts]
    owner = np.full((2, spec.shape[0], spec.numel // spec.shape[0]), -1)
    for side, table in enumerate(tables):
        for cell, row, col, rows, cols, *_ in table.tolist():
            owner[side, row : row + rows, col : col + cols] = cell
    found = meet(*tables)
    seen = np.zeros(owner.shape[1:], int)
    for k in range(len(found.row)):
        at = np.s_[found.row[k] : found.row[k] + found.rows[k], found.col[k] : found.col[k] + found.cols[k]]
        seen[at] += 1
        assert (owner[0][at] == found.src_cell[k]).all() and (owner[1][at] == found.dst_cell[k]).all()
    assert (seen == 1).all()
