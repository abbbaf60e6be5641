"""Certificates against linear programs that know nothing of the planner: element by element, solved by scipy."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from scipy.optimize import linprog

from rl3d.reshard import build_plan
from tests.reshard import oracle
from tests.reshard.test_plan_random import cases

GRAIN = 40
"""Bytes by which a sender may exceed the optimum in tiny cases, where elements cannot be cut."""


def classes_of(case):
    """(holders, takers) -> bytes, by looking at every element of every local tensor."""
    specs, numbers = case["specs"], oracle.numbered(case["specs"])
    width = {s.name: np.dtype(oracle.BITS[s.dtype]).itemsize for s in specs}
    sides = [oracle.shards(specs, numbers, **half.cut, tail=-1) for half in case["halves"]]
    found = defaultdict(int)
    for spec in specs:
        masks = np.zeros((2, spec.numel, case["world"]), bool)
        for side, shards in enumerate(sides):
            for rank, local in shards.items():
                if spec.name in local:
                    held = local[spec.name].reshape(-1)
                    masks[side, held[held >= 0], rank] = True
        rows, count = np.unique(np.concatenate(masks, axis=1), axis=0, return_counts=True)
        for row, n in zip(rows, count):
            has, wants = np.flatnonzero(row[: case["world"]]), np.flatnonzero(row[case["world"] :])
            if len(has) or len(wants):
                found[tuple(has.tolist()), tuple(wants.tolist())] += int(n) * width[spec.name]
    return found


def least_busy(demands):
    """min T such that every (bytes, senders) is sent and nobody sends more than T."""
    demands = [(amount, senders) for amount, senders in demands if amount]
    if not demands:
        return 0.0
    ranks = sorted({s for _, senders in demands for s in senders})
    pairs = [(d, ranks.index(s)) for d, (_, senders) in enumerate(demands) for s in senders]
    equal, below = np.zeros((len(demands), len(pairs) + 1)), np.zeros((len(ranks), len(pairs) + 1))
    for column, (d, s) in enumerate(pairs):
        equal[d, column] = below[s, column] = 1
    below[:, -1] = -1
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1
    solved = linprog(cost, below, np.zeros(len(ranks)), equal, [amount for amount, _ in demands], method="highs")
    assert solved.success
    return solved.fun


def check_certificate(case):
    src, dst = (half.layout for half in case["halves"])
    cert = build_plan(case["specs"], src, dst, staging_bytes=case["staging"], nodes=case["nodes"]).certificate
    nodes = case["nodes"] or [0] * case["world"]
    blind, entering, inside, ingress = [], [], defaultdict(list), defaultdict(int)
    for (has, wants), size in classes_of(case).items():
        lacking = [r for r in wants if r not in has]
        if not lacking:
            continue
        blind.append((size * len(lacking), has))
        for node in {nodes[r] for r in lacking}:
            takers = tuple(r for r in lacking if nodes[r] == node)
            near = tuple(r for r in has if nodes[r] == node)
            if near:
                inside[node].append((size * len(takers), near))
            else:
                ingress[node] += size
                entering.append((size, has))
                inside[node].append((size * (len(takers) - 1), takers))
    assert cert.sent_bound == math.ceil(least_busy(blind) - 1e-4)
    assert sum(cert.ingress) == sum(cert.ingress_bound) == sum(ingress.values()) == cert.between_nodes
    between, within = least_busy(entering), max((least_busy(d) for d in inside.values()), default=0)
    assert cert.between_bound == math.ceil(between - 1e-4)
    assert cert.inside_bound == math.ceil(within - 1e-4)
    assert between - 1e-4 <= cert.between_max <= 1.05 * between + GRAIN
    assert within - 1e-4 <= cert.inside_max <= 1.05 * within + GRAIN
    if len(set(nodes)) == 1:
        assert max(cert.sent, default=0) == cert.inside_max and cert.sent_bound == cert.inside_bound


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_bounds_are_the_optima_of_linear_programs(case):
    check_certificate(case)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_bounds_are_the_optima_of_linear_programs_in_thousands_of_cases(case):
    check_certificate(case)
