"""Checks before a move, in one process; real ranks are in test_ranks.py."""

import pytest
import torch

from rl3d.layout import GenMesh, Mesh, ShardLayout
from rl3d.reshard import Resharder, ReshardError, apply_plan_inprocess, build_plan
from tests.reshard import oracle
from tests.reshard.models import llama

SPECS = llama(2, 8, 8, 8, 8, dtype="float32")
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture
def move():
    """Plan TP2 -> TP1 on two ranks with matching tensors."""
    plan = build_plan(
        SPECS, ShardLayout.training(Mesh(2, 1, 1), 2), ShardLayout.generation(GenMesh(1, (0, 1)), 2), staging_bytes=512
    )
    arrays = oracle.whole(SPECS)
    src = {r: oracle.to_torch(SPECS, s) for r, s in oracle.shards(SPECS, arrays, {0: (0, 0), 1: (0, 1)}, 2, 1).items()}
    dst = {r: {s.name: torch.zeros(s.shape) for s in SPECS} for r in (0, 1)}
    return plan, src, dst, arrays


def _replace(tensors, rank, name, value):
    tensors[rank] = {**tensors[rank], name: value}


def test_moves_whole_models(move):
    plan, src, dst, arrays = move
    apply_plan_inprocess(plan, src, dst)
    for rank in (0, 1):
        for spec in SPECS:
            assert (oracle.to_numpy(dst[rank][spec.name]) == arrays[spec.name]).all()


@pytest.mark.parametrize(
    ("side", "value", "message"),
    [
        ("src", torch.zeros(3, 8), r"rank 1, source layout tp2\.pp1.*fc1.*expected shape \(8, 8\), found \(3, 8\)"),
        ("src", torch.zeros(8, 8, dtype=torch.bfloat16), "expected dtype float32, found bfloat16"),
        ("dst", torch.zeros(16, 8, dtype=torch.float64), "rank 1, destination .*expected dtype float32, found float64"),
        ("dst", torch.zeros(8, 16).t(), r"expected a contiguous tensor, found strides \(1, 16\)"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named_and_nothing_is_written(move, side, value, message):
    plan, src, dst, _ = move
    _replace(src if side == "src" else dst, 1, FC1, value)
    with pytest.raises(ReshardError, match=message):
        apply_plan_inprocess(plan, src, dst)
    assert not any(t.any() for t in dst[0].values())


def test_missing_and_surplus_tensors_are_named(move):
    plan, src, dst, _ = move
    del src[0][FC1]
    dst[1]["lm_head.weight"] = torch.zeros(1)
    with pytest.raises(ReshardError) as caught:
        apply_plan_inprocess(plan, src, dst)
    source = "rank 0, source layout tp2.pp1.dp1.zero1"
    assert f"{source}: parameter {FC1} is missing; expected shape (8, 8)" in str(caught.value)
    assert "rank 1, destination layout tp1x2: parameter lm_head.weight is not expected" in str(caught.value)


def test_released_memory_is_noticed(move):
    plan, src, dst, _ = move
    _replace(src, 1, FC1, torch.ones(8, 8))  # memory of numpy's cannot be released
    src[1][FC1].untyped_storage().resize_(0)
    with pytest.raises(ReshardError, match=f"{FC1}: its memory has been released"):
        apply_plan_inprocess(plan, src, dst)


def test_overlapping_memory_is_refused(move):
    plan, src, dst, _ = move
    both = torch.zeros(24, 8)
    _replace(src, 0, FC1, both[:8])
    _replace(dst, 0, FC1, both[4:20])
    with pytest.raises(ReshardError, match="share memory"):
        apply_plan_inprocess(plan, src, dst)
    name = "decoder.layers.0.input_layernorm.weight"
    _replace(src, 0, FC1, torch.zeros(8, 8))
    _replace(dst, 0, FC1, torch.zeros(16, 8))
    _replace(dst, 0, name, src[0][name])  # a replicated parameter stays where it is: allowed
    apply_plan_inprocess(plan, src, dst)


def test_one_memory_for_a_parameter_that_changes_place_is_refused():
    layouts = [ShardLayout.replicas(2, [[0, 1]], 2), ShardLayout("reversed", 2, (range(2),), {0: (0, 1), 1: (0, 0)})]
    plan = build_plan(SPECS, *layouts)
    tensors = {r: {s.name: torch.zeros(s.local_shape(2)) for s in SPECS} for r in (0, 1)}
    with pytest.raises(ReshardError, match="change place"):
        apply_plan_inprocess(plan, tensors, tensors)
    aliased = apply_plan_inprocess(build_plan(SPECS, layouts[0], layouts[0]), tensors, tensors)
    assert aliased == 0


def test_one_process_needs_no_group(move):
    plan, src, dst, arrays = move
    with pytest.raises(ReshardError, match=r"needs ranks \[1\]"):
        Resharder(plan, 0, None, src[0], dst[0], "cpu")
    one = ShardLayout.training(Mesh(1, 1, 1), 2)
    plan = build_plan(SPECS, one, ShardLayout.generation(GenMesh(1, (0,)), 2))
    whole = oracle.to_torch(SPECS, arrays)
    resharder = Resharder(plan, 0, None, whole, dst[0], "cpu")
    assert resharder.run().bytes_received == 0
    assert all(torch.equal(dst[0][n], t) for n, t in whole.items())
    # Parameters rebound to new memory, as optimisers do: the next run reads the new values.
    whole[FC1].data = torch.full_like(whole[FC1], 3.0)
    resharder.run()
    assert torch.equal(dst[0][FC1], torch.full((16, 8), 3.0))


def test_what_changes_between_runs_is_checked_again(move):
    _, _, dst, arrays = move
    one = ShardLayout.training(Mesh(1, 1, 1), 2)
    plan = build_plan(SPECS, one, ShardLayout.generation(GenMesh(1, (0,)), 2))
    whole = {n: t.clone() for n, t in oracle.to_torch(SPECS, arrays).items()}
    resharder = Resharder(plan, 0, None, whole, dst[0], "cpu")
    resharder.run()
    right = whole[FC1].data
    for wrong, message in ((right.view(8, 16), "expected shape"), (right.view(torch.int32), "expected dtype"),
                           (right.t().contiguous().t(), "contiguous")):  # fmt: skip
        whole[FC1].data = wrong
        with pytest.raises(ReshardError, match=message):
            resharder.run()
        with pytest.raises(ReshardError, match=message):
            resharder.run()  # and is not taken for sound the next time
    whole[FC1].data = right
    resharder.run()
    name = next(n for n in whole if n != FC1)
    resharder.src[name].untyped_storage().resize_(0)
    with pytest.raises(ReshardError, match="its memory has been released"):
        resharder.run()
