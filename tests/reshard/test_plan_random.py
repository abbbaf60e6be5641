"""Random layouts, models and caps against a brute-force oracle."""

import math
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl3d.layout import Mesh, ShardLayout
from rl3d.reshard import apply_plan_inprocess, build_plan, combine, fingerprint_tensor, local_fingerprints, schedule
from tests.reshard import oracle
from tests.reshard.models import llama


def _generation_groups(ranks: list[int], tp: int, stride: int) -> list[list[int]]:
    block = tp * stride
    return [ranks[b + i : b + block : stride] for b in range(0, len(ranks), block) for i in range(stride)]


@dataclass(frozen=True)
class Half:
    """One side of a move: our layout, and the oracle's description of the same."""

    layout: ShardLayout
    cut: dict
    source_only: bool = False


@dataclass(frozen=True)
class Training:
    """A training layout as numbers."""

    sizes: dict
    order: tuple
    vpp: int
    zero: int
    partitions: bool
    ep: int
    expert_tp: int

    @property
    def world(self):
        return math.prod(self.sizes.values())


@st.composite
def training_sides(draw, layers, experts, world=None):
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, min(3, layers)))
    dp = draw(st.sampled_from([n for n in (1, 2, 3) if tp * pp * n <= 9] or [1]))
    if world is not None:
        fits = [(a, b, world // (a * b)) for a in range(1, 5) for b in range(1, min(4, layers + 1)) if world % (a * b) == 0]
        tp, pp, dp = draw(st.sampled_from(fits))
    order = draw(st.sampled_from(ORDERS))
    if dp % 2 == 0 and draw(st.booleans()):
        order = draw(st.sampled_from([("dp:2", *order), (order[0], "dp:2", *order[1:])]))
        order = order if order.index("dp") > order.index("dp:2") else ("tp", "dp:2", "pp", "dp")
    vpp = draw(st.sampled_from([n for n in (1, 2) if n == 1 or (pp > 1 and pp * n <= layers)]))
    partitions = not experts and draw(st.integers(0, 3)) == 0
    zero = draw(st.sampled_from([1, 2] if partitions else [0, 1, 2, 3, 3]))
    grids = [(e, t) for e in (1, 2) for t in (1, 2, 3, 4) if (tp * dp) % (e * t) == 0 and experts % e == 0]
    ep, expert_tp = draw(st.sampled_from(grids if experts else [(1, tp)]))
    return Training({"tp": tp, "pp": pp, "dp": dp}, order, vpp, zero, partitions, ep, expert_tp)


ORDERS = list(permutations(("tp", "pp", "dp")))


@st.composite
def cases(draw):
    layers, experts = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 2, 4]))
    train = draw(training_sides(layers, experts))
    world = train.world
    if draw(st.integers(0, 2)) == 0:
        second = draw(training_sides(layers, experts, world))
        sizes = (second.sizes["tp"], second.expert_tp)
    else:
        count = draw(st.integers(1, world))
        tp = draw(st.sampled_from([n for n in range(1, 7) if count % n == 0]))
        stride = draw(st.sampled_from([n for n in range(1, count // tp + 1) if (count // tp) % n == 0]))
        ranks = sorted(draw(st.permutations(range(world)))[:count])
        ep = draw(st.sampled_from([n for n in (1, 2) if tp % n == 0 and experts and experts % n == 0] or [1]))
        second = (_generation_groups(ranks, tp, stride), ep)
        sizes = (tp, tp // ep)
    unit = math.lcm(train.sizes["tp"], train.expert_tp, *sizes)
    vocab = draw(st.integers(1, 3 * unit))
    specs = llama(
        layers=layers,
        hidden=unit * draw(st.integers(1, 2)),
        ffn=unit * draw(st.integers(1, 2)),
        vocab=vocab,
        qkv_rows=unit * draw(st.integers(1, 3)),
        padded_vocab=math.ceil(vocab / unit) * unit + unit * draw(st.integers(0, 2)),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        norm_dtype=draw(st.sampled_from([None, "float64"])),
        experts=experts,
    )
    halves = [_half(side, specs, layers, experts) for side in (train, second)]
    # A generation layout on some of the ranks still holds the whole model, so it can be a source; what DP ranks have
    # updated is one only.
    if halves[1].source_only or (not halves[0].source_only and draw(st.booleans())):
        halves.reverse()
    if halves[1].source_only:
        halves[1] = _half(replace(train, partitions=False), specs, layers, experts)
    return dict(
        halves=halves, specs=specs, world=world, staging=draw(st.sampled_from([128, 200, 333, 1024, 1 << 20])),
        nodes=draw(st.sampled_from([None, [r // 2 for r in range(world)], [r % 2 for r in range(world)],
                                    [r // 4 for r in range(world)]])),
    )  # fmt: skip


def _half(side, specs, layers, experts):
    if not isinstance(side, Training):
        groups, ep = side
        places = {rank: (0, slot) for group in groups for slot, rank in enumerate(group)}
        tp = len(groups[0])
        return Half(
            ShardLayout.replicas(tp, groups, layers, experts=experts, ep=ep),
            dict(places=places, tp=tp, pp=1, experts=(experts, ep, tp // ep)),
        )
    sizes = side.sizes
    coords = {rank: oracle.train_place(sizes, side.order, rank) for rank in range(side.world)}
    mesh = Mesh(**sizes, order=side.order)
    cut = dict(
        places={rank: (c["pp"], c["tp"], c["dp"]) for rank, c in coords.items()},
        tp=sizes["tp"], pp=sizes["pp"], vpp=side.vpp, parts=sizes["dp"] if side.zero == 3 else None,
        experts=(experts, side.ep, side.expert_tp), partitions=sizes["dp"] if side.partitions else None,
    )  # fmt: skip
    if side.partitions:
        return Half(ShardLayout.partitions(mesh, layers, specs, vpp=side.vpp, zero=side.zero), cut, True)
    options = dict(zero=side.zero, vpp=side.vpp, experts=experts, ep=side.ep, expert_tp=side.expert_tp)
    return Half(ShardLayout.training(mesh, layers, **options), cut)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_moves_equal_brute_force(case):
    check(case)


def check(case):
    specs, world = case["specs"], case["world"]
    (src, src_cut), (dst, dst_cut) = ((half.layout, half.cut) for half in case["halves"])
    plan = build_plan(specs, src, dst, staging_bytes=case["staging"], nodes=case["nodes"])

    arrays = oracle.whole(specs)
    before = oracle.shards(specs, arrays, **src_cut, tail=oracle.PAD)
    cleared = {s.name: arrays[s.name].copy() for s in specs}
    for spec in specs:
        if spec.valid_rows is not None:
            cleared[spec.name][spec.valid_rows :] = 0
    after = oracle.shards(specs, cleared, **dst_cut)
    sources = {rank: oracle.to_torch(specs, local) for rank, local in before.items()}
    targets = {rank: oracle.to_torch(specs, {n: np.full_like(a, -5) for n, a in local.items()})
               for rank, local in after.items()}  # fmt: skip
    addresses = {(r, n): t.data_ptr() for r, local in targets.items() for n, t in local.items()}
    staging = apply_plan_inprocess(plan, sources, targets)

    for rank, local in after.items():
        for name, expected in local.items():
            np.testing.assert_array_equal(oracle.to_numpy(targets[rank][name]), expected, f"rank {rank} {name}")
            assert targets[rank][name].data_ptr() == addresses[rank, name]
    assert staging == plan.certificate.staging_peak <= case["staging"]
    _check_written_once(plan, after)
    _check_bytes(plan, specs, src_cut, dst_cut)
    _check_senders_hold(plan, before, after)
    found = [combine(local_fingerprints(specs, layout, r, by_rank.get(r, {})) for r in range(world))
             for layout, by_rank in ((src, sources), (dst, targets))]  # fmt: skip
    wholes = {s.name: fingerprint_tensor(oracle.to_torch(specs, {s.name: arrays[s.name]})[s.name], s.valid_rows)
              for s in specs}  # fmt: skip
    assert found[0] == found[1] == wholes


def _check_written_once(plan, after):
    written = {(rank, name): np.zeros(a.size, int) for rank, local in after.items() for name, a in local.items()}
    for p, dst, rows, cols, offset, pitch in zip(
        plan.rows.param, plan.rows.dst, plan.rows.rows, plan.rows.cols, plan.rows.dst_offset, plan.rows.dst_pitch
    ):
        index = offset + np.arange(rows)[:, None] * pitch + np.arange(cols)
        written[int(dst), plan.names[p]][index] += 1
    for where, count in written.items():
        assert (count == 1).all(), where


def _check_bytes(plan, specs, src_cut, dst_cut):
    numbers = oracle.numbered(specs)
    before, after = (oracle.shards(specs, numbers, **cut, tail=-1) for cut in (src_cut, dst_cut))
    by_name = {s.name: s for s in specs}
    least = tuple(
        sum(oracle.missing_bytes(by_name[n], before.get(rank, {}).get(n), a) for n, a in after[rank].items())
        for rank in plan.certificate.destination_ranks
    )
    assert plan.certificate.bound == plan.certificate.received == least
    assert sum(plan.certificate.sent) == sum(least)
    assert plan.certificate.ratio == 1.0


def _check_senders_hold(plan, before, after):
    rows = plan.rows
    for p, src, n, cols, offset, pitch, relay in zip(
        rows.param, rows.src, rows.rows, rows.cols, rows.src_offset, rows.src_pitch, rows.relay
    ):
        if src >= 0:
            held = after if relay else before
            assert offset + (n - 1) * pitch + cols <= held[int(src)][plan.names[p]].size


def test_three_dimensional_parameters_are_cut_along_the_middle():
    from rl3d.layout import ParamSpec

    specs = [
        ParamSpec("decoder.layers.0.a", (3, 4, 2), 1, layer=0), ParamSpec("decoder.layers.0.b", (4, 2, 3), 0, layer=0)
    ]  # fmt: skip
    src = ShardLayout.replicas(4, [[0, 1, 2, 3]], 1)
    dst = ShardLayout.replicas(2, [[0, 1], [2, 3]], 1)
    plan = build_plan(specs, src, dst)
    full = {s.name: torch.arange(24.0).reshape(s.shape) for s in specs}
    shards = {n: {r: {s.name: full[s.name].chunk(n, s.dim)[r % n].contiguous() for s in specs} for r in range(4)}
              for n in (4, 2)}  # fmt: skip
    targets = {r: {n: torch.zeros_like(t) for n, t in local.items()} for r, local in shards[2].items()}
    apply_plan_inprocess(plan, shards[4], targets)
    assert all(torch.equal(targets[r][n], t) for r, local in shards[2].items() for n, t in local.items())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_shortcuts_for_very_many_streams_move_the_same(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MANY", 1)
        patch.setattr(schedule, "MATCHED", 0)
        check(case)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_thousands_of_random_moves_equal_brute_force(case):
    check(case)
