"""Experts: names of both flavours, and places against megatron-core's own rank generator."""

import pytest

from rl3d.layout import ExpertGrid, LayoutError, Mesh, ParamSpec, ShardLayout, expert_name, split_expert_name

BASE = "decoder.layers.3.mlp.experts"


@pytest.mark.parametrize("part", ["linear_fc1.weight", "linear_fc2.weight", "linear_fc2.bias"])
def test_names_of_both_flavours(part):
    local, grouped = f"{BASE}.local_experts.12.{part}", f"{BASE}.{part}12"
    for name in (local, grouped):
        assert split_expert_name(name) == (f"{BASE}.{part}", 12)
        assert expert_name(name, 5, grouped=False) == f"{BASE}.local_experts.5.{part}"
        assert expert_name(name, 5, grouped=True) == f"{BASE}.{part}5"
    assert split_expert_name("decoder.layers.3.mlp.router.weight") is None
    with pytest.raises(LayoutError, match="not a parameter of an expert"):
        expert_name("decoder.layers.3.mlp.linear_fc1.weight", 0, grouped=True)


@pytest.mark.parametrize("sizes", [(2, 1, 4, 2, 2), (4, 2, 2, 4, 1), (1, 2, 8, 4, 1), (2, 2, 4, 2, 1), (4, 1, 2, 2, 2)])
def test_places_are_megatrons(sizes):
    from megatron.core.parallel_state import RankGenerator

    tp, pp, dp, ep, expert_tp = sizes
    replicas = tp * dp // (ep * expert_tp)
    theirs = RankGenerator(tp=expert_tp, ep=ep, dp=replicas, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    layout = ShardLayout.training(Mesh(tp, pp, dp, ("tp", "dp", "pp")), pp, experts=8, ep=ep, expert_tp=expert_tp)
    for ranks in theirs.get_ranks("ep"):
        for position, rank in enumerate(ranks):
            for expert in range(8):
                layer = rank * pp // (tp * pp * dp)
                spec = ParamSpec(f"{BASE}.linear_fc1.weight{expert}", (16, 4), 0, (8, 8), layer, expert=expert)
                assert layout.holds(spec, rank) == (expert * ep // 8 == position)
    spec = ParamSpec(f"{BASE}.linear_fc1.weight0", (16, 4), 0, (8, 8), 0, expert=0)
    homes = [list(cell.ranks) for cell in layout.cells(spec)]
    first = [ranks for ranks in theirs.get_ranks("dp") if ranks in homes]
    assert len(homes) == len(first) == expert_tp, "replicas of an expert's shard are megatron's expert-data ranks"


def test_layouts_without_room_for_the_experts():
    with pytest.raises(LayoutError, match="6 experts do not divide by ep = 4"):
        ExpertGrid.of("x", 8, 6, 4, 1)
    with pytest.raises(
        LayoutError, match="the 4 tensor- and data-parallel ranks .* do not divide by ep x expert tp = 2 x 4"
    ):
        ShardLayout.training(Mesh(4, 1, 1), 1, experts=8, ep=2)
    spec = ParamSpec(f"{BASE}.linear_fc1.weight3", (16, 4), 0, (8, 8), 0, expert=3)
    with pytest.raises(LayoutError, match="belongs to expert 3, but layout .* was made for 0 experts"):
        ShardLayout.training(Mesh(2, 1, 1), 1).cells(spec)
