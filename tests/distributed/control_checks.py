"""The control channel on real ranks; one launch runs every scenario in turn, each on a channel of its own."""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed.bootstrap import Runtime
from rl3d.distributed.control import ControlChannel, ControlError


class Toy:
    """Two modes; a switch is a real collective on a group of its own, as in the actor."""

    def __init__(self, runtime: Runtime, name: str, timeout_s: float = 20.0) -> None:
        self.runtime = runtime
        self.group = dist.new_group(timeout=None)
        self.mode = "train"
        self.threads: list[str] = []
        self.runs: list[str] = []
        handlers: dict[str, Callable[[], Any]] = {
            "generation": lambda: self._switch("generation"),
            "training": lambda: self._switch("training"),
            "broken": self._broken,
            "nested": self._nested,
        }
        self.channel = ControlChannel(
            runtime.store, runtime.rank, runtime.world_size, threading.RLock(), handlers, timeout_s, name=name
        )

    def _switch(self, mode: str) -> int:
        ones = torch.ones(1, device=self.runtime.device)
        dist.all_reduce(ones, group=self.group)
        self.mode = mode
        self.runs.append(mode)
        self.threads.append(threading.current_thread().name)
        return int(ones)

    def _broken(self) -> None:
        if self.runtime.rank == 2:
            raise ValueError("no room for the arena")

    def _nested(self) -> str:
        self.channel.call("generation")
        self.channel.call("training")
        return self.mode

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(values, value)
        return values


def _error(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _median_seconds(function: Callable[[], Any], rounds: int = 100) -> float:
    dist.barrier()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def one_rank_only(runtime: Runtime) -> dict[str, Any]:
    """The promise as written: a call on rank 0, then a barrier on all."""
    toy = Toy(runtime, "one")
    result = toy.channel.call("generation") if runtime.rank == 0 else None
    dist.barrier()
    modes, threads = toy.gather(toy.mode), toy.gather(toy.threads)
    if runtime.rank == 0:
        toy.channel.call("training")
        toy.channel.call("generation")
    dist.barrier()
    toy.channel.close()
    return {"result": result, "modes": modes, "threads": threads, "runs": toy.gather(toy.runs)}


def all_ranks(runtime: Runtime) -> dict[str, Any]:
    toy = Toy(runtime, "all")
    results = [toy.channel.call("generation"), toy.channel.call("training"), toy.channel.call("nested")]
    switch = _median_seconds(lambda: toy.channel.call("generation"))
    bare = _median_seconds(lambda: dist.all_reduce(torch.ones(1, device=runtime.device), group=toy.group))
    toy.channel.close()
    return {"results": results, "threads": toy.gather(sorted(set(toy.threads))), "overhead_ms": (switch - bare) * 1e3}


def late_rank_joins(runtime: Runtime) -> dict[str, Any]:
    """Rank 1 makes the calls long after its listener did; each is run once and its result is handed over."""
    toy = Toy(runtime, "late")
    if runtime.rank == 1:
        time.sleep(1.0)
    results = [toy.channel.call("generation"), toy.channel.call("training"), toy.channel.call("generation")]
    runs = toy.gather(toy.runs)
    result = toy.channel.call("update", run=lambda: toy.mode)  # one with arguments: all take part, on main threads
    toy.channel.close()
    return {"results": toy.gather(results), "runs": runs, "modes": toy.gather(result)}


def some_claim_some_do_not(runtime: Runtime) -> dict[str, Any]:
    """Rank 0 switches alone every round, all switch back: nothing of one round is taken for another."""
    toy = Toy(runtime, "mixed")
    for _ in range(5):
        if runtime.rank == 0:
            toy.channel.call("generation")
        dist.barrier()
        toy.channel.call("rollout", run=lambda: None)
        toy.channel.call("training")
    toy.channel.close()
    return {"runs": toy.gather(toy.runs), "modes": toy.gather(toy.mode)}


def different_order(runtime: Runtime) -> dict[str, Any]:
    toy = Toy(runtime, "order", timeout_s=60)
    calls = ["generation", "training"] if runtime.rank != 1 else ["training", "generation"]
    dist.barrier()
    begin = time.perf_counter()
    first = _error(lambda: toy.channel.call(calls[0]))
    seconds = time.perf_counter() - begin
    errors = toy.gather(first)
    again = _error(lambda: toy.channel.call("training"))  # the sequence goes on after the caller has put it right
    toy.channel.close()
    return {"errors": errors, "seconds": toy.gather(seconds), "again": toy.gather(again), "runs": toy.gather(toy.runs)}


def different_order_when_late(runtime: Runtime) -> dict[str, Any]:
    """As above, but rank 1 comes so late that its listener has already followed rank 0."""
    toy = Toy(runtime, "lateorder", timeout_s=2)
    calls = ["generation", "training"]
    if runtime.rank == 1:
        time.sleep(0.5)
        calls.reverse()
    errors = [_error(lambda name=name: toy.channel.call(name)) for name in calls]
    dist.barrier()
    errors.append(_error(lambda: toy.channel.call("rollout", run=lambda: None)) if runtime.rank != 1 else None)
    toy.channel.close()
    return {"errors": toy.gather(errors)}


def nobody_joins(runtime: Runtime) -> dict[str, Any]:
    toy = Toy(runtime, "alone", timeout_s=1)
    error = _error(lambda: toy.channel.call("rollout", run=lambda: None)) if runtime.rank == 0 else None
    dist.barrier()
    follower = _error(lambda: toy.channel.call("generation")) if runtime.rank == 1 else None
    dist.barrier()
    toy.channel.close()
    return {"errors": toy.gather(error), "follower": toy.gather(follower)}


def handler_fails(runtime: Runtime) -> dict[str, Any]:
    """Fails on rank 2's listener: rank 0 hears at once, ranks 1 and 2 at their next call."""
    toy = Toy(runtime, "broken")
    at_once = _error(lambda: toy.channel.call("broken")) if runtime.rank == 0 else None
    dist.barrier()
    next_call = _error(lambda: toy.channel.call("generation")) if runtime.rank != 0 else None
    dist.barrier()
    recovered = toy.channel.call("generation")
    toy.channel.close()
    return {"at_once": at_once, "next": toy.gather(next_call), "recovered": recovered}


SCENARIOS = (
    one_rank_only,
    all_ranks,
    late_rank_joins,
    some_claim_some_do_not,
    different_order,
    different_order_when_late,
    nobody_joins,
    handler_fails,
)


def main(runtime: Runtime) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        begin = time.perf_counter()
        results[scenario.__name__] = scenario(runtime) | {"wall": time.perf_counter() - begin}
        dist.barrier()
    return results


def closed_channel_raises() -> str | None:
    """In one process: the fast path, and a closed channel."""
    channel = ControlChannel(None, 0, 1, threading.RLock(), {"generation": lambda: 7}, 5.0)
    assert channel.call("generation") == 7
    channel.close()
    try:
        channel.call("generation")
    except ControlError as error:
        return str(error)
    return None
