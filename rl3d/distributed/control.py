"""One call, every rank: ``if rank == 0: actor.switch_to_generation()`` works although the operation is collective.

Operations form one global sequence. An entry of the sequence is announced in the job's store by the first rank that
reaches it, joined by all, run by all. A rank whose main thread does not make the call (it waits in a barrier, say)
lets a listener thread carry it out; when its main thread makes the same call later, that call takes the result.

Entry ``n`` lives in these keys, of which the last rank to join entry ``n + 1`` clears those of entry ``n``:
    e/n  what is called, by whom first     l/n    the leader has joined
    c/n  how many have joined              go/n   "ok", or why the entry fails on every rank: decided once
    d/n  how many have finished            end/n  "ok", or which rank's handler failed first: decided once
    at/r the entry that rank r joined last (kept)
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed.rollcall import LostRankError, RollCall

log = logging.getLogger(__name__)

_OK = "ok"
_ABSENT = "\0"
_SLICE_S = 0.5  # how often a listener that waits for the lock looks whether it is still needed


class ControlError(RuntimeError):
    """Ranks disagree about the next operation, a rank did not join it, or it failed on another rank."""


@dataclass
class _Carried:
    """An operation that the listener has run and the main thread has not called yet."""

    sequence: int
    operation: str
    result: Any = None
    error: BaseException | None = None


@contextlib.contextmanager
def _store_needed(operation: str) -> Iterator[None]:
    """Say what the loss of the store means, in place of c10d's words for a closed connection."""
    try:
        yield
    except dist.DistError as error:
        raise ControlError(
            f"{operation} broke off: the job's store has gone, with the process that keeps it (rank 0, or the launcher). "
            f"{error}"
        ) from error


class ControlChannel:
    """The sequence of operations of one actor.

    Args:
        store: c10d store shared by the ranks; two connections of our own are made from it.
        rank, world_size: of this process.
        lock: the actor's re-entrant lock, held while an operation runs.
        handlers: the operations by name, with arguments that JSON can carry; a listener may run them.
        timeout_s: how long a rank waits for the others to join, and to finish.
        leader: only operations that this rank has called are carried out by listeners; a call that another rank makes
            alone fails after ``timeout_s``. Otherwise calls in different order could pass unnoticed.
        grace_s: how long a listener leaves an announced operation to its rank's own main thread.
        name: prefix of the keys; one per channel, the same on all ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        lock: Any,
        handlers: dict[str, Callable[..., Any]],
        timeout_s: float,
        *,
        leader: int = 0,
        grace_s: float = 0.05,
        name: str = "control",
    ) -> None:
        self.rank, self.world_size, self.leader = rank, world_size, leader
        self.lock, self.handlers = lock, handlers
        self.timeout_s, self.grace_s, self.name = timeout_s, grace_s, name
        self._position = 0  # the next entry; changes only under the lock
        self._moved = threading.Condition()
        self._carried: list[_Carried] = []
        self._running_thread: int | None = None  # inside an operation: nested calls belong to it
        self._closed = threading.Event()
        self._listener: threading.Thread | None = None
        if world_size == 1:
            return
        self._store = store.clone()
        self._roll = RollCall(store, rank, world_size, name)
        if rank != leader:
            cuda = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._listener = threading.Thread(
                target=self._listen, args=(store.clone(), cuda), name=f"rl3d-{name}", daemon=True
            )
            self._listener.start()

    def call(self, operation: str, run: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Run ``operation`` here and on all ranks; returns this rank's result.

        Without ``run`` the operation is ``handlers[operation]``, called with ``arguments``, which must be the same on all
        ranks that call it; ranks that do not are served by their listeners, and it has ended on every rank when this
        returns. With ``run`` (an operation with arguments of its own
        on each rank) every rank must make the call itself. Calls from inside an operation are part of it.

        Raises:
            ControlError: ranks called different operations, or with different arguments, at this point of the sequence,
                some rank did not join or finish within ``timeout_s``, the operation failed on another rank, or a rank has
                gone in its middle (the message names it).
            Exception: whatever the operation raised on this rank, in this call or on the listener before it.
        """
        if run is None and operation not in self.handlers:
            raise ControlError(f"unknown operation {operation!r}: expected one of {', '.join(sorted(self.handlers))}")
        if run is None and arguments:
            operation = f"{operation} {json.dumps(arguments, sort_keys=True)}"
        function = run if run is not None else self._handler(operation)
        if self._running_thread == threading.get_ident():
            return function()
        if self._closed.is_set():
            raise ControlError(f"{operation}: the channel is closed")
        if not self.lock.acquire(timeout=self.timeout_s):
            raise ControlError(f"{operation}: another thread of rank {self.rank} held the lock for {self.timeout_s:g} s")
        try:
            if self.world_size == 1:
                return self._inside(function)
            if (carried := self._claim(operation, joinable=run is None)) is not None:
                if carried.error is not None:
                    raise carried.error
                return carried.result
            return self._take_part(self._store, operation, function, joinable=run is None)
        finally:
            self.lock.release()

    def close(self) -> None:
        """Stop the listener of this rank. Local; later calls raise."""
        self._closed.set()
        if self.world_size > 1:
            self._roll.close()
        with self._moved:
            self._moved.notify_all()
        if self._listener is not None and threading.current_thread() is not self._listener:
            self._listener.join(timeout=5)

    # ---- taking part in an entry (under the lock)

    def _take_part(self, store: Any, operation: str, function: Callable[[], Any], joinable: bool) -> Any:
        sequence = self._position
        try:
            with _store_needed(operation):
                last = self._join(store, sequence, operation, joinable)
            if not joinable:
                return self._inside(function)
            try:
                result = self._inside(function)
            except LostRankError as error:
                raise ControlError(self._decide_lost(store, sequence, operation, error)) from error
            except BaseException as error:
                message = f"{operation} failed on rank {self.rank}: {type(error).__name__}: {error}"
                with contextlib.suppress(dist.DistError):  # this rank's own error says more than a lost store
                    self._decide(store, "end", sequence, message)
                raise
            with _store_needed(operation):
                self._finish(store, sequence, operation)
                if last:
                    self._clear(store, sequence - 1)
            return result
        finally:
            self._position = sequence + 1
            with self._moved:
                self._moved.notify_all()

    def _join(self, store: Any, sequence: int, operation: str, joinable: bool) -> bool:
        """Agree on the entry with all ranks; True on the rank that joined last."""
        mine = {"op": operation, "rank": self.rank, "joinable": joinable}
        entry = json.loads(store.compare_set(self._key("e", sequence), "", json.dumps(mine)))
        if (entry["op"], entry["joinable"]) != (operation, joinable):
            reason = (
                f"ranks disagree on operation {sequence} of {self.name!r}: rank {entry['rank']} called {entry['op']}, "
                f"rank {self.rank} called {operation}. Make the calls in the same order on all ranks"
                + (f", or on rank {self.leader} only." if joinable or entry["joinable"] else ".")
            )
            raise ControlError(self._decide(store, "go", sequence, reason))
        store.set(self._key("at", self.rank), str(sequence))
        if self.rank == self.leader:
            store.set(self._key("l", sequence), "1")
        last = store.add(self._key("c", sequence), 1) == self.world_size
        verdict = self._decide(store, "go", sequence, _OK) if last else self._await(store, self._key("go", sequence))
        if verdict is None:
            absent = self._absent(store, sequence)
            hint = "every rank must make this call itself"
            if joinable:
                hint = f"only calls made on rank {self.leader} are carried out for ranks that do not make them"
            verdict = self._decide(
                store,
                "go",
                sequence,
                f"{operation}, called by rank {entry['rank']}, was not joined by rank(s) {absent} within "
                f"{self.timeout_s:g} s: {hint}.",
            )
        if verdict != _OK:
            raise ControlError(verdict)
        return last

    def _finish(self, store: Any, sequence: int, operation: str) -> None:
        if store.add(self._key("d", sequence), 1) == self.world_size:
            verdict: str | None = self._decide(store, "end", sequence, _OK)
        else:
            verdict = self._await(store, self._key("end", sequence))
        if verdict is None:
            count = self.world_size - int(store.add(self._key("d", sequence), 0))
            verdict = self._decide(
                store, "end", sequence, f"{operation} did not end on {count} rank(s) within {self.timeout_s:g} s."
            )
        if verdict != _OK:
            raise ControlError(verdict)

    def _decide_lost(self, store: Any, sequence: int, operation: str, error: LostRankError) -> str:
        """Who has gone: in words, the same on every rank that asks while the store lives."""
        try:
            gone = ", ".join(str(rank) for rank in self._roll.absent())
        except LostRankError as lost:
            return f"{operation} broke off: {lost}. {error}"
        text = f"{operation} broke off: rank(s) {gone} no longer answer. {error}"
        if not gone:
            text = f"{operation} broke off, though every rank still answers. {error}"
        try:
            return self._decide(store, "end", sequence, text)
        except dist.DistError:  # whoever keeps the store found out first, and ended
            return text

    def _handler(self, operation: str) -> Callable[[], Any]:
        """What stands behind an announced operation: its name, and its arguments as JSON, if any."""
        name, _, arguments = operation.partition(" ")
        if name not in self.handlers:
            raise ControlError(f"rank {self.rank} has no operation {name!r}, which another rank called")
        return partial(self.handlers[name], **(json.loads(arguments) if arguments else {}))

    def _inside(self, function: Callable[[], Any]) -> Any:
        before, self._running_thread = self._running_thread, threading.get_ident()
        try:
            return function()
        finally:
            self._running_thread = before

    def _claim(self, operation: str, joinable: bool) -> _Carried | None:
        """The earliest carried-out entry that this call stands for; everything before it counts as called too."""
        for index, carried in enumerate(self._carried):
            if carried.error is not None or (joinable and carried.operation == operation):
                del self._carried[: index + 1]
                return carried
        self._carried.clear()  # a new entry comes after all of them in this rank's program
        return None

    # ---- store

    def _key(self, kind: str, number: int) -> str:
        return f"{self.name}/{kind}/{number}"

    def _decide(self, store: Any, kind: str, sequence: int, verdict: str) -> str:
        """Propose a verdict; the first one proposed stands, on every rank."""
        return store.compare_set(self._key(kind, sequence), "", verdict).decode()

    def _await(self, store: Any, key: str) -> str | None:
        """The value of a key, or None after ``timeout_s``.

        Polls with growing pauses: a blocking wait of the store cannot be interrupted and logs each of its time-outs.
        """
        end = time.monotonic() + self.timeout_s
        pause = 1e-4
        # compare_set with an expectation that never holds is a read in one round trip; a missing key gives it back.
        while (value := store.compare_set(key, _ABSENT, _ABSENT).decode()) == _ABSENT:
            if time.monotonic() > end:
                return None
            time.sleep(pause)
            pause = min(pause * 1.3, max(0.02, self.world_size / 2000))  # many ranks share one store server
        return value

    def _absent(self, store: Any, sequence: int) -> str:
        absent = []
        for rank in range(self.world_size):
            key = self._key("at", rank)
            if not store.check([key]) or int(store.get(key)) < sequence:
                absent.append(str(rank))
        return ", ".join(absent)

    def _clear(self, store: Any, sequence: int) -> None:
        if sequence >= 0:
            for kind in ("e", "l", "c", "go", "d", "end"):
                store.delete_key(self._key(kind, sequence))

    # ---- the listener

    def _listen(self, store: Any, cuda: Any) -> None:
        if cuda is not None:
            torch.cuda.set_device(cuda)  # the current device is a thread's own
        pause = max(0.05, self.world_size / 1000)
        try:
            while not self._closed.is_set():
                sequence = self._position
                if not store.check([self._key("l", sequence)]):
                    self._closed.wait(pause)
                    continue
                if self._closed.wait(self.grace_s) or self._position != sequence:
                    continue
                entry = json.loads(store.get(self._key("e", sequence)))
                if not entry["joinable"]:  # only the main thread can: wait until it has
                    with self._moved:
                        while self._position == sequence and not self._closed.is_set():
                            self._moved.wait()
                    continue
                self._carry(store, sequence, entry["op"])
        except RuntimeError as error:  # the store has gone; rl3d.distributed.failures ends the rank if that is a failure
            if not self._closed.is_set():
                log.debug("control listener of rank %d stops: %s", self.rank, error)

    def _carry(self, store: Any, sequence: int, operation: str) -> None:
        while not self.lock.acquire(timeout=_SLICE_S):
            if self._closed.is_set() or self._position != sequence:
                return
        try:
            if self._position != sequence or self._closed.is_set():
                return
            carried = _Carried(sequence, operation)
            try:
                carried.result = self._take_part(store, operation, self._handler(operation), joinable=True)
            except Exception as error:
                carried.error = error
                log.error("%s, carried out on rank %d for rank %d: %s", operation, self.rank, self.leader, error)
            self._carried.append(carried)
        finally:
            self.lock.release()
