"""One rank of ``rl3d bench switch``: builds the weights of each pair of layouts and times the ways between them."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.bench import BenchError
from rl3d.bench.arena import Arena, arena_bytes, filling_bytes
from rl3d.bench.gather import GatherAll
from rl3d.bench.peer_copy import plain_peer_copy
from rl3d.distributed import bootstrap, failures
from rl3d.distributed.bootstrap import Runtime
from rl3d.layout import GenLayout, Mesh, ParamSpec, ShardLayout, TrainLayout
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard import Resharder, build_plan, compare, fingerprint_shards
from rl3d.reshard.mapping import mesh_choices
from rl3d.reshard.spans import totals
from rl3d.reshard.streams import bucket_bytes
from rl3d.reshard.transports import CollectiveTransport, PeerTransport, Transport


def measure(config: dict[str, Any], pairs: Sequence[tuple[str, str]], transport: str, device: str, staging: int,
            repeats: int, baselines: bool, limit_gb: float | None,
            show: Callable[[dict[str, Any], dict[str, Any] | None], None]) -> dict[str, Any] | None:  # fmt: skip
    """All pairs; the report on rank 0, elsewhere ``None``. A pair that the memory cannot hold is a case with ``refused``.

    Args:
        limit_gb: what each device has free, instead of what it says.
        show: called on rank 0 with what holds for all pairs, and then with each case as soon as it is there.

    Raises :class:`BenchError` for a transport that the device does not have.
    """
    arch = Architecture.from_hf(config)
    runtime = bootstrap.init(timeout_s=300, device=device)
    with failures.guard(runtime):
        kind = runtime.device.type
        if (transport in ("ipc", "nccl")) != (kind == "cuda") and transport != "auto":
            raise BenchError(f"bench switch: --transport {transport} on {kind}; a GPU has ipc and nccl, a CPU shm and gloo")
        notes = []
        if baselines and find_spec("megatron") is None:
            notes.append("megatron-core is not installed, so its column is empty")
        name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
        cases: list[dict[str, Any]] = []
        found = {"parameters": arch.num_parameters, "ranks": runtime.world_size, "device": name,
                 "repeats": repeats, "cases": cases, "notes": notes}  # fmt: skip
        if runtime.rank == 0:
            show(found, None)
        for train, gen in pairs:
            pair = _Pair(arch, train, gen, runtime, staging)
            refused = pair.does_not_fit(baselines, limit_gb)
            case = {"train": train, "gen": gen, "refused": refused, "changed": []}
            if not refused:
                pair.allocate()
                case |= pair.measure(transport, repeats, baselines)
            cases.append(case)
            if runtime.rank == 0:
                show(found, case)
            del pair
            _give_back(runtime)
        runtime.shutdown()
        return found if runtime.rank == 0 else None


class _Pair:
    """Weights of one pair of layouts."""

    def __init__(self, arch: Architecture, train_text: str, gen_text: str, runtime: Runtime, staging: int) -> None:
        self.runtime, self.staging = runtime, staging
        self.rank, self.device, world = runtime.rank, runtime.device, runtime.world_size
        text, _, parts = train_text.partition(":")
        if parts not in ("", "partitions"):
            raise BenchError(f"bench switch: --train {train_text}; only :partitions may follow the layout")
        train, gen = TrainLayout.parse(text).resolve(world), GenLayout.parse(gen_text)
        if parts and train.zero not in (1, 2):
            raise BenchError(f"bench switch: --train {train_text}; zero1 and zero2 have partitions")
        self.specs: list[ParamSpec] = parameter_specs(arch, arch.padded_vocab(train.tp, gen.tp), "bfloat16")
        best = min(mesh_choices(self.specs, train, gen, world, None))
        self.mesh, self.gen = Mesh.of(train, world, best.order), gen
        self.replicas = best.gen_groups(gen.tp, world)
        layers = arch.num_layers
        self.whole = ShardLayout.training(self.mesh, layers, zero=1, vpp=train.vpp)  # after the gather of ZeRO
        if parts:
            self.source = ShardLayout.partitions(self.mesh, layers, self.specs, vpp=train.vpp, zero=train.zero)
        else:
            self.source = ShardLayout.training(self.mesh, layers, zero=train.zero, vpp=train.vpp)
        self.sharded = bool(parts) or train.zero == 3
        self.target = ShardLayout.replicas(gen.tp, self.replicas, layers)

    def does_not_fit(self, baselines: bool, limit_gb: float | None) -> str:
        """Why a device could not hold what its ranks want, in words; the same on all ranks."""
        layouts = [self.source, self.target] + [self.whole] * (baselines and self.sharded)
        need = sum(arena_bytes(self.specs, layout, self.rank) for layout in layouts) + filling_bytes(self.specs)
        free = _free(self.device) if limit_gb is None else int(limit_gb * 1e9)
        everyone: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(everyone, (_where(self.runtime), need, free))
        for where in dict.fromkeys(place for place, _, _ in everyone):
            wanted = sum(need for place, need, _ in everyone if place == where)
            there = min(free for place, _, free in everyone if place == where)
            if wanted > there:
                return (f"{wanted / 1e6:,.1f} MB wanted by the ranks on one device, {there / 1e6:,.1f} MB free; take a "
                        f"larger tp or pp in --train, or a smaller --shape")  # fmt: skip
        return ""

    def allocate(self) -> None:
        """Make the weights of both layouts."""
        self.src = Arena(self.specs, self.source, self.rank, self.device)
        self.src.fill(self.specs)
        self.dst = Arena(self.specs, self.target, self.rank, self.device)
        self.dst.poison()

    def measure(self, transport: str, repeats: int, baselines: bool) -> dict[str, Any]:
        self.repeats, self.changed = repeats, []
        self.expected = fingerprint_shards(self.specs, self.source, self.rank, self.src.weights)
        seconds = {"copy": self._time(self._copy_once)}
        before = self._memory()
        plan = build_plan(self.specs, self.source, self.target, staging_bytes=bucket_bytes(self.staging))
        carrier = self._transport(transport)
        mover = Resharder(plan, self.rank, None, self.src.weights, self.dst.weights, self.device, carrier)
        mover.run()
        _reset_peak()
        transient = _peak()
        report = mover.run()
        extra = self._memory() - before + (_peak() - transient)
        if (peer_copy := plain_peer_copy(plan, self.rank, self.src.bytes, self.dst.bytes)) is not None:
            seconds["peer_copy"] = self._time(peer_copy)
        del peer_copy  # it maps the peers' memory
        self._check("ours", mover.run)
        seconds["ours"] = self._time(mover.run)
        if baselines:
            seconds["all_gather"] = self._gather_all()
            if find_spec("megatron") is not None:
                seconds["megatron_core"] = self._megatron()
        back = build_plan(self.specs, self.target, self.source, staging_bytes=bucket_bytes(self.staging))
        self._check("ours", mover.run)
        returner = Resharder(
            back, self.rank, None, self.dst.weights, self.src.weights, self.device, self._transport(transport)
        )
        self.src.poison()
        returner.run()
        found = fingerprint_shards(self.specs, self.source, self.rank, self.src.weights)
        self.changed += ["back"] if compare(self.expected, found) else []
        seconds["back"] = self._time(returner.run)
        numbers = torch.tensor([report.bytes_received, report.bytes_local, report.staging_bytes, extra])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        received, local, staging, extra = numbers.tolist()
        return {
            "transport": report.transport, "seconds": seconds,
            "received_max": received, "local_max": local, "bound": plan.certificate.to_json()["bound_max"],
            "stages": totals(report.spans, depth=1),
            "staging_bytes": staging, "staging_cap": self.staging, "extra_bytes": extra, "changed": self.changed,
        }  # fmt: skip

    def _transport(self, name: str) -> Transport:
        if name in ("nccl", "gloo"):
            return CollectiveTransport(None, self.device)
        return PeerTransport(None, self.device, self.rank, nodes=self.runtime.nodes, required=name != "auto")

    # ---- the other ways

    def _copy_once(self) -> None:
        """One copy of as many bytes as the generation weights have, out of the training weights."""
        source, at = self.src.bytes, 0
        while at < len(self.dst.bytes):
            part = self.dst.bytes[at : at + len(source)]
            part.copy_(source[: len(part)])
            at += len(part)

    def _gather_all(self) -> float:
        ranks = range(self.runtime.world_size)
        gather = GatherAll(self.specs, self.source, self.target, self.rank, ranks, None, self.device)

        def run() -> None:
            gather.run(self.src.weights, self.dst.weights)

        self._check("all-gather", run)
        return self._time(run)

    def _megatron(self) -> float:
        """Its executor knows no ZeRO: where weights are sharded, they are gathered among data-parallel ranks first."""
        from rl3d.bench.megatron_swap import Swap

        whole, gather = self.src, None
        if self.sharded:
            whole = Arena(self.specs, self.whole, self.rank, self.device)
            groups = [(members, dist.new_group(list(members))) for members in self.mesh.groups("dp")]
            members, group = next((m, g) for m, g in groups if self.rank in m)
            gather = GatherAll(self.specs, self.source, self.whole, self.rank, members, group, self.device)
        slots = [[group[slot] for group in self.replicas] for slot in range(self.gen.tp)]
        alone = [[rank] for rank in range(self.runtime.world_size)]
        swap = Swap(
            self.specs, self.rank,
            (whole.weights, self.mesh.tp, {axis: self.mesh.groups(axis) for axis in ("tp", "dp", "pp")}),
            (self.dst.weights, self.gen.tp, {"tp": self.replicas, "dp": slots, "pp": alone}), self.device,
        )  # fmt: skip

        def run() -> None:
            if gather is not None:
                gather.run(self.src.weights, whole.weights)
            swap.run()

        self._check("megatron-core", run)
        return self._time(run)

    # ---- measuring

    def _check(self, name: str, action: Callable[[], Any]) -> None:
        """Whether ``action`` brings every parameter into the generation weights."""
        self.dst.poison()
        action()
        if compare(self.expected, fingerprint_shards(self.specs, self.target, self.rank, self.dst.weights)):
            self.changed.append(name)

    def _time(self, action: Callable[[], Any]) -> float:
        """Median over the repeats of what the slowest rank takes."""
        times = []
        for _ in range(self.repeats):
            self._settle()
            dist.barrier()
            start = time.perf_counter()
            action()
            self._settle()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times.append(took.item())
        return statistics.median(times)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self) -> int:
        """Bytes in use: of this rank's share of its GPU, or of this process without what it shares with others."""
        self._settle()
        dist.barrier()
        if self.device.type == "cpu":
            return _status("RssAnon")
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info(self.device)
        dist.barrier()
        here = max(1, self.runtime.local_world_size // torch.cuda.device_count())
        return (total - free) // here


def _where(runtime: Runtime) -> str:
    """What ranks on one device, or of one host on a CPU, have in common."""
    card = "" if runtime.device.type == "cpu" else str(torch.cuda.get_device_properties(runtime.device).uuid)
    return f"{runtime.node_rank} {card}"


def _free(device: torch.device) -> int:
    """Bytes free on the device, or in the host; everything where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 2**62
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 2**62)


def _give_back(runtime: Runtime) -> None:
    """Memory of the pair before, on all ranks, before anybody looks at what is free: peers' mappings hold it, too."""
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
        for _ in range(2):  # what a peer mapped is only ours again when it has let go
            dist.barrier()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
    dist.barrier()


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)


def _reset_peak() -> None:
    """Let the peak of this process's memory start from what it has now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _peak() -> int:
    return _status("VmHWM")
