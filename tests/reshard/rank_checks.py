"""Moves between real ranks; called by test_ranks.py."""

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl3d.layout import GenMesh, Mesh, ShardLayout
from rl3d.reshard import (
    Resharder,
    ReshardError,
    build_plan,
    fingerprint_shards,
    fingerprint_tensor,
    replica_differences,
    replicas_equal,
)
from rl3d.reshard.streams import bucket_bytes
from rl3d.reshard.transports import PeerTransport
from rl3d.reshard.transports import peer as peer_module
from tests.reshard import oracle
from tests.reshard.models import llama

STAGING = 1024
HOSTS = {"one host": None, "two hosts": (0, 0, 1, 1)}
TYPED = {"tied": (True, "bfloat16", "float32"), "untied": (False, "float32", None)}


def main(runtime: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=60))
    every = (0, 1, 2, 3)
    moves = {
        "tp2.pp2->tp4 tied": ((2, 2, 1, ("pp", "tp", "dp")), GenMesh(4, every), "tied"),
        "tp2.pp1.dp2->tp1x4": ((2, 1, 2, ("tp", "pp", "dp")), GenMesh(1, every), "untied"),
        "tp2.pp2->tp1 on two ranks": ((2, 2, 1, ("dp", "pp", "tp")), GenMesh(1, (1, 2)), "tied"),
    }
    return {
        **{name: _round_trip(rank, group, *move) for name, move in moves.items()},
        **{
            f"{name}, {hosts}": _round_trip(rank, group, *move, peer=True, nodes=nodes)
            for name, move in moves.items()
            for hosts, nodes in HOSTS.items()
        },
        "peers": _peers(rank, group),
        "errors": _errors(rank, group),
        "replicas": _replicas(rank, group),
        "subgroup": _subgroup(rank),
    }


def _round_trip(
    rank: int, group: Any, mesh: tuple, gen: GenMesh, kind: str, *, peer: bool = False, nodes: Any = None
) -> dict[str, Any]:
    tp, pp, dp, order = mesh
    tied, dtype, norm_dtype = TYPED[kind]
    specs = llama(4, 16, 24, 19, 24, padded_vocab=24, tied=tied, dtype=dtype, norm_dtype=norm_dtype)
    arrays = oracle.whole(specs)
    sizes = {"tp": tp, "pp": pp, "dp": dp}
    coords = {r: oracle.train_place(sizes, order, r) for r in range(4)}
    train_places = {r: (c["pp"], c["tp"]) for r, c in coords.items()}
    gen_places = {r: (0, i % gen.tp) for i, r in enumerate(gen.ranks)}
    train = ShardLayout.training(Mesh(*mesh), 4)
    generation = ShardLayout.generation(gen, 4)

    weights = oracle.to_torch(specs, oracle.shards(specs, arrays, train_places, tp, pp)[rank])
    wanted = oracle.to_torch(specs, oracle.shards(specs, arrays, gen_places, gen.tp, 1).get(rank, {}))
    generated = {n: torch.full_like(t, 9) for n, t in wanted.items()}
    there = build_plan(specs, train, generation, staging_bytes=bucket_bytes(STAGING), nodes=[0, 0, 1, 1])
    back = build_plan(specs, generation, train, staging_bytes=bucket_bytes(STAGING), nodes=[0, 0, 1, 1])
    before = {n: t.clone() for n, t in weights.items()}
    prints = [fingerprint_shards(specs, train, rank, weights, group)]

    def transport() -> Any:
        return PeerTransport(group, torch.device("cpu"), rank, nodes=nodes) if peer else None

    forward = Resharder(there, rank, group, weights, generated, "cpu", transport())
    backward = Resharder(back, rank, group, generated, weights, "cpu", transport())
    addresses = {n: t.data_ptr() for n, t in (*generated.items(), *weights.items())}
    reports, equal = [], []
    valid = {s.name: s.valid_rows for s in specs}
    for _ in range(2):
        for tensor in generated.values():
            tensor.fill_(9)
        reports.append(forward.run())
        prints.append(fingerprint_shards(specs, generation, rank, generated, group))
        equal.append(all(_same(generated[n], t, gen, valid[n], gen_places.get(rank)) for n, t in wanted.items()))
        for tensor in weights.values():
            tensor.fill_(7)
        reports.append(backward.run())
        prints.append(fingerprint_shards(specs, train, rank, weights, group))
        equal.append(all(_same(weights[n], t, train, valid[n], train_places[rank]) for n, t in before.items()))
    whole = oracle.to_torch(specs, arrays)
    prints.append({s.name: fingerprint_tensor(whole[s.name], s.valid_rows) for s in specs})
    mine = dict(
        equal=all(equal),
        fingerprints_agree=all(p == prints[0] for p in prints) and len(set(prints[0].values())) == len(specs),
        staging=max(r.staging_bytes for r in reports),
        addresses_kept=addresses == {n: t.data_ptr() for n, t in (*generated.items(), *weights.items())},
        received_as_planned=_planned(there, rank) == reports[0].bytes_received == reports[2].bytes_received,
        messages=sum(r.messages for r in reports),
        buckets=there.certificate.buckets,
        replicas=replicas_equal(specs, train, rank, weights, group)
        and replicas_equal(specs, generation, rank, generated, group),
    )
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, mine, group=group)
    return {key: [e[key] for e in everyone] for key in mine}


def _planned(plan: Any, rank: int) -> int:
    cert = plan.certificate
    return dict(zip(cert.destination_ranks, cert.received, strict=True)).get(rank, 0)


def _same(found: torch.Tensor, expected: torch.Tensor, layout: Any, valid: int | None, place: Any) -> bool:
    """Bit-equal; padding rows of the vocabulary (all shards have 24 / tp rows) are zero."""
    if valid is not None:
        rows = found.shape[0]
        real = min(max(valid - place[1] * rows, 0), rows)
        if found[real:].any():
            return False
        found, expected = found[:real], expected[:real]
    return bool((oracle.to_numpy(found) == oracle.to_numpy(expected)).all())


def _two(rank: int, staging: int = 1 << 20) -> tuple[list, Any, dict, dict]:
    """Plan TP2.DP2 -> TP1 x 4 with tensors of ones."""
    specs = llama(1, 8, 8, 8, 8, dtype="float32")
    train, gen = ShardLayout.training(Mesh(2, 1, 2), 1), ShardLayout.generation(GenMesh(1, (0, 1, 2, 3)), 1)
    plan = build_plan(specs, train, gen, staging_bytes=staging)
    src = {s.name: torch.ones(s.local_shape(2)) for s in specs}
    return specs, plan, src, {s.name: torch.zeros(s.shape) for s in specs}


def _errors(rank: int, group: Any) -> dict[str, Any]:
    """A mistake on one rank is an error on all of them, with nothing written."""
    name = "decoder.layers.0.mlp.linear_fc2.weight"

    def outcome(build: Any) -> list[str]:
        try:
            build()
            message = "no error"
        except ReshardError as error:
            message = str(error)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, message, group=group)
        return everyone

    _, plan, src, dst = _two(rank)
    wrong = {**src, name: torch.zeros(5, 4)} if rank == 2 else src
    shape = outcome(lambda: Resharder(plan, rank, group, wrong, dst, "cpu"))
    _, other, _, _ = _two(rank, 4096 if rank == 3 else 1 << 20)
    plans = outcome(lambda: Resharder(other, rank, group, src, dst, "cpu"))
    good = Resharder(plan, rank, group, src, dst, "cpu")
    if rank == 1:
        src[name].untyped_storage().resize_(0)
    released = outcome(good.run)
    untouched = not any(t.any() for t in dst.values())
    if rank == 1:
        src[name].untyped_storage().resize_(src[name].numel() * 4)
        src[name].fill_(1)
    good.run()
    return dict(shape=shape, plans=plans, released=released, untouched=untouched,
                recovered=all(bool((t == 1).all()) for t in dst.values()))  # fmt: skip


def _peers(rank: int, group: Any) -> dict[str, Any]:
    """What can go wrong with peers' memory: an error everywhere, or messages in its place."""
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    cpu = torch.device("cpu")

    def everyone(value: Any) -> list[Any]:
        out: list[Any] = [None] * 4
        dist.all_gather_object(out, value, group=group)
        return out

    def error(action: Any) -> list[str]:
        try:
            action()
            return everyone("no error")
        except ReshardError as caught:
            return everyone(str(caught))

    _, plan, src, dst = _two(rank)
    transport = PeerTransport(group, cpu, rank)
    resharder = Resharder(plan, rank, group, src, dst, "cpu", transport)
    resharder.run()
    if rank in (0, 2):  # the sources of rank 3 (and 1) move to other memory, as when an optimiser rebinds them
        src[name].data = torch.full_like(src[name], 5.0)
    resharder.run()
    moved = everyone(float(dst[name][:, :4].mean()))
    table = transport._early
    targets, sources = table._targets, table._sources
    if rank == 2:  # a copy that cannot be carried out
        table._targets, table._sources = [*targets, torch.zeros(2)], [*sources, torch.zeros(3)]
    died = error(resharder.run)
    table._targets, table._sources = targets, sources
    recovered = error(resharder.run)

    links = _links(rank, group)
    original = peer_module.attach
    if rank == 1:

        def refuse(exported: Any, device: torch.device) -> Any:
            raise OSError("not permitted here")

        peer_module.attach = refuse
    with _Lines() as lines:
        fallback = PeerTransport(group, cpu, rank)
    required = error(lambda: PeerTransport(group, cpu, rank, required=True))
    peer_module.attach = original
    for tensor in dst.values():
        tensor.zero_()
    report = Resharder(plan, rank, group, src, dst, "cpu", fallback).run()
    right = everyone(all(bool(t.any()) for t in dst.values()) and float(dst[name][:, :4].mean()) == 5.0)
    return dict(
        moved=moved, died=died, recovered=recovered, required=required, right=right, lines=everyone(lines.found),
        names=everyone(report.transport), staging=everyone(report.staging_bytes), full=_full(rank, group),
        links=everyone(links),
    )  # fmt: skip


def _links(rank: int, group: Any) -> list[Any]:
    """Host memory is nobody's link; with exports that say they are of other GPUs, the first measured move knows a rate."""
    _, plan, src, dst = _two(rank)
    cpu, original = torch.device("cpu"), peer_module.export
    mover = Resharder(plan, rank, group, src, dst, "cpu", PeerTransport(group, cpu, rank))
    mover.measures_link = True
    near = mover.run()
    peer_module.export = lambda storage: replace(original(storage), gpu=f"GPU-{rank}")
    mover = Resharder(plan, rank, group, src, dst, "cpu", PeerTransport(group, cpu, rank))
    peer_module.export = original
    runs = [mover.run()]
    mover.measures_link = True
    runs += [mover.run(), mover.run()]
    peer_module._rates.clear()
    apart = PeerTransport(group, cpu, rank, nodes=(0, 0, 1, 1))
    report = Resharder(plan, rank, group, src, dst, "cpu", apart, nodes=(0, 0, 1, 1)).run()
    kinds = [report.transport, report.inside]  # messages between the nodes are no link inside one
    return [[near.inside, near.peer_gb_per_s], *([far.inside, far.peer_gb_per_s] for far in runs), kinds]


def _full(rank: int, group: Any) -> dict[str, Any]:
    """Rank 2 may share the probe, but has no room for its weights: only what it would have given travels in messages."""
    _, plan, src, dst = _two(rank)
    values = {name: torch.full_like(tensor, 3.0 + rank % 2) for name, tensor in src.items()}
    cpu, original = torch.device("cpu"), peer_module.export
    transports = [PeerTransport(group, cpu, rank), PeerTransport(group, cpu, rank, required=True)]

    def export(storage: Any) -> Any:
        if rank == 2 and storage.nbytes() > 64:
            raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
        return original(storage)

    peer_module.export = export
    try:
        with _Lines() as lines:
            report = Resharder(plan, rank, group, values, dst, "cpu", transports[0]).run()
        try:
            Resharder(plan, rank, group, values, dst, "cpu", transports[1])
            refused = "no error"
        except ReshardError as error:
            refused = str(error)
    finally:
        peer_module.export = original
    weight = dst["decoder.layers.0.mlp.linear_fc2.weight"]  # its columns come from TP ranks 0 and 1
    right = bool((weight[:, :4] == 3).all() and (weight[:, 4:] == 4).all())
    mine = [right, lines.found, report.transport, report.staging_bytes, refused, sorted(transports[0]._maps[rank])]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, mine, group=group)
    keys = ("right", "lines", "name", "staging", "refused", "maps")
    return {key: [m[i] for m in everyone] for i, key in enumerate(keys)}


class _Lines(logging.Handler):
    """Collects what the transports log."""

    def __enter__(self) -> "_Lines":
        self.found: list[str] = []
        logging.getLogger(peer_module.__name__).addHandler(self)
        return self

    def __exit__(self, *ignored: Any) -> None:
        logging.getLogger(peer_module.__name__).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _replicas(rank: int, group: Any) -> dict[str, Any]:
    """One flipped bit on one replica is found and named on every rank."""
    specs, _, src, _ = _two(rank)
    layout = ShardLayout.training(Mesh(2, 1, 2), 1)
    clean = replica_differences(specs, layout, rank, src, group)
    if rank == 2:
        src["decoder.layers.0.self_attention.linear_qkv.weight"].view(torch.int32)[1, 2] ^= 1
    return dict(clean=clean, differs=replica_differences(specs, layout, rank, src, group))


def _subgroup(rank: int) -> bool:
    """Ranks 1 and 3 move between themselves in a group of their own: global ranks are translated."""
    group = dist.new_group([1, 3], timeout=timedelta(seconds=60))
    good = True
    if rank in (1, 3):
        specs = llama(1, 8, 8, 8, 8, dtype="float32")
        src, dst = ShardLayout.replicas(2, [[1, 3]], 1), ShardLayout.replicas(1, [[1], [3]], 1)
        arrays = oracle.whole(specs)
        mine = oracle.to_torch(specs, oracle.shards(specs, arrays, {1: (0, 0), 3: (0, 1)}, 2, 1)[rank])
        found = {s.name: torch.zeros(s.shape) for s in specs}
        Resharder(build_plan(specs, src, dst), rank, group, mine, found, "cpu").run()
        good = all(bool((oracle.to_numpy(found[s.name]) == arrays[s.name]).all()) for s in specs)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, good)
    return all(everyone)
