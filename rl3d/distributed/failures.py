"""A rank that fails takes all down, whoever started the ranks; its traceback is shown once.

Launchers see only the ranks of their own node, and a rank stuck in a collective sees nothing at all. So every rank
keeps a thread with a store connection of its own that looks for the first failure published there.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl3d.distributed.bootstrap import Runtime
from rl3d.distributed.launcher import FAILURE_FILE

_FIRST = "failure/first"
_SEEN = "failure/seen"
_STORE_GONE: dict[str, Any] = {"rank": 0, "error": "its process (or the one that keeps the job's store) has gone"}
POLL_S = 0.5
_LINGER_S = 5.0  # rank 0 hosts the store: it stays this long at most for the others to read what happened


@contextlib.contextmanager
def guard(runtime: Runtime) -> Iterator[None]:
    """Put the whole work of a rank inside: ``with failures.guard(runtime): main()`` (or decorate main with it).

    On an exception the rank publishes it, prints the traceback unless another rank failed before, and exits with 1;
    the other ranks print one line naming the first failed rank and exit with 1 within seconds, wherever their main
    thread is. A clean end calls ``runtime.shutdown()``. With one rank the exception is simply raised.
    """
    if runtime.world_size == 1:
        yield
        runtime.shutdown()
        return
    watcher = _Watcher(runtime)
    runtime.before_leaving.append(watcher.stop)
    watcher.start()
    try:
        yield
        runtime.shutdown()
    except SystemExit as stop:
        if stop.code in (0, None):
            runtime.shutdown()
            raise
        _fail(runtime, watcher, f"exit code {stop.code}", "")
    except KeyboardInterrupt:
        _fail(runtime, watcher, "interrupted", "")
    except BaseException as error:
        inside = error.__traceback__.tb_next if error.__traceback__ else None  # without this function's own frame
        text = "".join(traceback.format_exception(type(error), error, inside))
        _fail(runtime, watcher, _one_line(error), text)


def _fail(runtime: Runtime, watcher: "_Watcher", error: str, text: str) -> None:
    record = {"rank": runtime.rank, "error": error, "traceback": text}
    first = watcher.publish(record)
    if first["rank"] == runtime.rank:
        _report_to_launcher(record)
        if text:
            _say(text.rstrip(), end="\n")
        _say(f"rank {runtime.rank} failed: {error}; stopping all ranks")
    else:
        _say(f"rank {first['rank']} failed: {first['error']}; stopping rank {runtime.rank}")
    watcher.linger()
    _exit()


class _Watcher(threading.Thread):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(name="rl3d-failures", daemon=True)
        self.runtime = runtime
        self.hosts_store = runtime.rank == 0 and runtime.starter != "torchrun"
        self._stopped = threading.Event()
        self._failing = threading.Event()  # this rank's own failure is being handled by its main thread
        self._reader = runtime.new_store()
        self._writer = runtime.new_store()

    def run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                if not self._reader.check([_FIRST]):
                    continue
                first = json.loads(self._reader.get(_FIRST))
                self._reader.add(_SEEN, 1)
            except RuntimeError:  # the server of the store has gone
                if self._stopped.is_set():
                    return
                first = _STORE_GONE
            if self._failing.is_set() or self._stopped.is_set():
                return
            _say(f"rank {first['rank']} failed: {first['error']}; stopping rank {self.runtime.rank}")
            self.linger()
            _exit()

    def stop(self) -> None:
        """Before a clean leave. Returns when the thread no longer touches the store."""
        self._stopped.set()
        if threading.current_thread() is not self and self.is_alive():
            self.join(timeout=5)

    def publish(self, record: dict[str, Any]) -> dict[str, Any]:
        """Publish a failure of this rank; returns the first failure of the job, which may be another's."""
        self._failing.set()
        try:
            return json.loads(self._writer.compare_set(_FIRST, "", json.dumps(record)))
        except (RuntimeError, ValueError):
            return record if self.runtime.rank == 0 else _STORE_GONE

    def linger(self) -> None:
        """Keep the store alive until the other ranks have read of the failure."""
        if not self.hosts_store:
            return
        end = time.monotonic() + _LINGER_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and self._writer.add(_SEEN, 0) < self.runtime.world_size - 1:
                time.sleep(0.05)


def _report_to_launcher(record: dict[str, Any]) -> None:
    path = os.environ.get(FAILURE_FILE)
    if path:
        with contextlib.suppress(OSError):
            draft = Path(f"{path}.{record['rank']}")
            draft.write_text(json.dumps(record))
            draft.replace(path)  # in one step: the launcher never reads half a report


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + end)  # one write, so that ranks' lines do not mix
        sys.stderr.flush()


def _exit() -> None:
    """End now: destructors of process groups may wait for ranks that have gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
