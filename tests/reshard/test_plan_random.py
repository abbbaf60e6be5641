"""Random layouts, models and caps against a brute-force oracle."""

import math
from itertools import permutations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl3d.layout import Mesh, ShardLayout
from rl3d.reshard import apply_plan_inprocess, build_plan, combine, fingerprint_tensor, local_fingerprints
from tests.reshard import oracle
from tests.reshard.models import llama


def _generation_groups(ranks: list[int], tp: int, stride: int) -> list[list[int]]:
    block = tp * stride
    return [ranks[b + i : b + block : stride] for b in range(0, len(ranks), block) for i in range(stride)]


@st.composite
def cases(draw):
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dp = draw(st.sampled_from([n for n in (1, 2, 3) if tp * pp * n <= 9] or [1]))
    world = tp * pp * dp
    count = draw(st.integers(1, world))
    tp_gen = draw(st.sampled_from([n for n in range(1, 7) if count % n == 0]))
    stride = draw(st.sampled_from([n for n in range(1, count // tp_gen + 1) if (count // tp_gen) % n == 0]))
    ranks = sorted(draw(st.permutations(range(world)))[:count])
    unit = math.lcm(tp, tp_gen)
    vocab = draw(st.integers(1, 3 * unit))
    padded = math.ceil(vocab / unit) * unit + unit * draw(st.integers(0, 2))
    specs = llama(
        layers=pp * draw(st.integers(1, 2)) if pp == 1 else pp,
        hidden=unit * draw(st.integers(1, 2)),
        ffn=unit * draw(st.integers(1, 2)),
        vocab=vocab,
        qkv_rows=unit * draw(st.integers(1, 3)),
        padded_vocab=padded,
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        norm_dtype=draw(st.sampled_from([None, "float64"])),
    )
    return dict(
        tp=tp, pp=pp, dp=dp, order=draw(st.sampled_from(list(permutations(("tp", "pp", "dp"))))),
        groups=_generation_groups(ranks, tp_gen, stride), tp_gen=tp_gen, specs=specs,
        to_generation=draw(st.booleans()), staging=draw(st.sampled_from([128, 200, 1024, 1 << 20])),
        nodes=draw(st.sampled_from([None, [r // 2 for r in range(world)], [r % 2 for r in range(world)]])),
    )  # fmt: skip


@settings(max_examples=320, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_moves_equal_brute_force(case):
    specs, tp, pp = case["specs"], case["tp"], case["pp"]
    layers = max(s.layer for s in specs if s.layer is not None) + 1
    sizes = {"tp": tp, "pp": pp, "dp": case["dp"]}
    world = math.prod(sizes.values())
    coords = {rank: oracle.train_place(sizes, case["order"], rank) for rank in range(world)}
    train_places = {rank: (c["pp"], c["tp"]) for rank, c in coords.items()}
    gen_places = {rank: (0, slot) for group in case["groups"] for slot, rank in enumerate(group)}
    sides = [
        (ShardLayout.training(Mesh(tp, pp, case["dp"], case["order"]), layers), train_places, tp, pp),
        (ShardLayout.replicas(case["tp_gen"], case["groups"], layers), gen_places, case["tp_gen"], 1),
    ]
    if not case["to_generation"]:
        # A generation layout on some of the ranks still holds the whole model, so it can be a source.
        sides.reverse()
    (src, *src_cut), (dst, *dst_cut) = sides
    plan = build_plan(specs, src, dst, staging_bytes=case["staging"], nodes=case["nodes"])

    arrays = oracle.whole(specs)
    before = oracle.shards(specs, arrays, *src_cut)
    cleared = {s.name: arrays[s.name].copy() for s in specs}
    for spec in specs:
        if spec.valid_rows is not None:
            cleared[spec.name][spec.valid_rows :] = 0
    after = oracle.shards(specs, cleared, *dst_cut)
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
    _check_senders_hold(plan, before)
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
    before, after = (oracle.shards(specs, numbers, *cut) for cut in (src_cut, dst_cut))
    by_name = {s.name: s for s in specs}
    least = tuple(
        sum(oracle.missing_bytes(by_name[n], before.get(rank, {}).get(n), a) for n, a in after[rank].items())
        for rank in plan.certificate.destination_ranks
    )
    assert plan.certificate.bound == plan.certificate.received == least
    assert sum(plan.certificate.sent) == sum(least)
    assert plan.certificate.ratio == 1.0


def _check_senders_hold(plan, before):
    for p, src, rows, cols, offset, pitch in zip(
        plan.rows.param, plan.rows.src, plan.rows.rows, plan.rows.cols, plan.rows.src_offset, plan.rows.src_pitch
    ):
        if src >= 0:
            assert offset + (rows - 1) * pitch + cols <= before[int(src)][plan.names[p]].size


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
