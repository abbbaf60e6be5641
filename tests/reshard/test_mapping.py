"""Mesh orders and generation slots: exact prices, known optima, brute force over all assignments."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.config import ConfigError
from rl3d.config.sections import LayoutConfig
from rl3d.layout import GenLayout, LayoutError, Mesh, ShardLayout, TrainLayout, count_layers
from rl3d.reshard import build_plan, mesh_choices
from rl3d.reshard.assignment import assign_slots
from tests.reshard.models import llama, llama_70b


def _move(specs, train, choice, gen_tp, world, **options):
    layers = count_layers(specs)
    src = ShardLayout.training(Mesh.of(train, world, choice.order), layers, zero=train.zero)
    return build_plan(specs, src, ShardLayout.replicas(gen_tp, choice.gen_groups(gen_tp, world), layers), **options)


@pytest.mark.parametrize(
    "case", [("tp2.pp2", 4, 8), ("tp3.pp2", 2, 12), ("tp2.zero3", 4, 8), ("tp1.pp2.zero3", 3, 6), ("tp4", 3, 12)]
)
def test_prices_equal_plans_and_ingress_is_what_enters(case):
    train, gen, world = TrainLayout.parse(case[0]).resolve(case[2]), GenLayout(case[1]), case[2]
    specs = llama(3, 24, 12, 13, 36, padded_vocab=24, tied=True, norm_dtype="float32")
    per_node = 4 if world % 4 == 0 else 3
    choices = mesh_choices(specs, train, gen, world, per_node)
    assert any(c.gen_stride == 0 for c in choices) or gen.tp % train.tp == 0
    for choice in choices[::3]:
        cert = _move(specs, train, choice, gen.tp, world, nodes=[r // per_node for r in range(world)]).certificate
        assert (max(cert.received), sum(cert.received) / world) == (choice.received_max, choice.received_mean)
        assert max(cert.ingress) == choice.ingress


def test_a_split_axis_reaches_the_optimum_inside_nodes():
    """70B TP4.PP4.DP4 -> TP8: ranks of a node must come in pairs of one training shard, which no plain order does."""
    specs, train = llama_70b(), TrainLayout.parse("tp4.pp4").resolve(64)
    best = min(mesh_choices(specs, train, GenLayout(8), 64, gpus_per_node=8))
    plain = min(mesh_choices(specs, train, GenLayout(8), 64, 8, orders=list(permutations(("tp", "pp", "dp")))))
    assert best.order == ("pp:2", "tp", "pp", "dp") and best.nodes == plain.nodes == 1
    assert best.received_mean / 1e9 == pytest.approx(12.93, abs=0.01) and plain.received_mean / 1e9 > 16
    mesh = Mesh.of(train, 64, best.order)
    for axis in ("tp", "pp", "dp"):
        for group in mesh.groups(axis):
            assert [getattr(mesh.coords(r), axis) for r in group] == list(range(4)), "indices rise with ranks"
    assert sorted(mesh.rank(**mesh.coords(r)._asdict()) for r in range(64)) == list(range(64))


@pytest.mark.parametrize(
    "order", [("dp:2", "tp", "pp"), ("tp", "dp", "pp", "dp:2"), ("tp", "pp", "xp"), ("dp:3", "tp", "pp", "dp")]
)
def test_orders_that_are_none(order):
    with pytest.raises(LayoutError, match="mesh order"):
        Mesh(2, 2, 4, order)


@st.composite
def costs(draw):
    tp, times = draw(st.sampled_from([(2, 2), (3, 2), (2, 3), (1, 4), (4, 1), (3, 1)]))
    rows = st.lists(st.integers(0, 6), min_size=tp, max_size=tp)
    return np.array(draw(st.lists(rows, min_size=tp * times, max_size=tp * times))), tp, times


@settings(max_examples=60, deadline=None, derandomize=True)
@given(costs())
def test_slots_are_the_best_of_all_admissible_assignments(case):
    cost, tp, times = case
    best = None
    for word in set(permutations(np.repeat(range(tp), times).tolist())):
        counts = np.zeros(tp, int)
        for slot in word:
            counts[slot] += 1
            if slot and counts[slot] > counts[slot - 1]:
                break
        else:
            prices = [cost[r][s] for r, s in enumerate(word)]
            value = (max(prices), sum(prices))
            best = value if best is None else min(best, value)
    slots = assign_slots(cost, tp * times, tp)
    prices = cost[np.arange(len(slots)), slots]
    assert (prices.max(), prices.sum()) == best
    groups = [np.flatnonzero(slots == s) for s in range(tp)]
    assert all((a < b).all() for a, b in zip(groups, groups[1:], strict=False)), "slots rise with rank in every group"


def test_layouts_that_do_not_nest_get_slots_one_by_one():
    """TP3 -> TP2: the rank that trains the middle third fits neither half better; strides cannot give each its best."""
    specs, train = llama(2, 12, 12, 12, 36), TrainLayout.parse("tp3").resolve(6)
    choices = mesh_choices(specs, train, GenLayout(2), 6)
    best = min(choices)
    assert best.received_max <= min(c.received_max for c in choices if c.gen_stride)
    layout = ShardLayout.replicas(2, best.gen_groups(2, 6), 2)
    assert layout.ranks == tuple(range(6))


def test_some_ranks_generate():
    specs, train = llama(2, 8, 8, 8, 8), TrainLayout.parse("tp2.pp2").resolve(8)
    best = min(mesh_choices(specs, train, GenLayout(2), 8, ranks=(1, 2, 4, 7)))
    assert sorted(r for group in best.gen_groups(2, 8) for r in group) == [1, 2, 4, 7]
    with pytest.raises(LayoutError, match=r"generation ranks \(1, 9\).*below 8"):
        mesh_choices(specs, train, GenLayout(2), 8, ranks=(1, 9))
    with pytest.raises(LayoutError, match="3 ranks do not divide by tp = 2"):
        mesh_choices(specs, train, GenLayout(2), 8, ranks=(1, 2, 3))


def test_a_split_order_can_be_written_in_the_configuration():
    assert LayoutConfig(order="dp:2-tp-pp-dp").axis_order == ("dp:2", "tp", "pp", "dp")
    for wrong in ("dp:2-tp-pp", "tp-pp-dp-dp:2", "dp:0-tp-pp-dp"):
        with pytest.raises(ConfigError, match="an axis may be split, as in dp:2-tp-pp-dp"):
            LayoutConfig(order=wrong)
    with pytest.raises(LayoutError, match="'dp:4' does not divide dp = 6"):
        Mesh(1, 1, 6, ("dp:4", "tp", "pp", "dp"))
