"""Start the ranks of a job on this machine, watch them, end them together. No torch here: the parent stays small."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rl3d.distributed.environment import free_port, is_launched

__all__ = ["JobResult", "LocalJob", "is_launched", "launch_local", "run_local"]

FAILURE_FILE = "RL3D_FAILURE_FILE"  # where the first rank that fails writes {"rank", "error", "traceback"}
STOPPED = 75  # exit code of ranks that were asked to stop (EX_TEMPFAIL of sysexits.h): no failure, the job is not done
GRACE_S = 10.0  # between TERM and KILL
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JobResult:
    """How a job ended: exit code (0 when all ranks did well, :data:`STOPPED` when they were asked to stop) and, if not,
    which rank failed first and its traceback."""

    code: int
    failed_rank: int | None = None
    reason: str = ""  # one line
    traceback: str = ""  # empty when the rank left none (it was killed)


def launch_local(
    argv: Sequence[str], nproc: int, log_dir: str | Path | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Run ``python argv...`` as ``nproc`` ranks of one job on this machine; returns the exit code.

    Rank 0 writes to the terminal; every rank's output goes to ``log_dir/rank{N}.log`` too. When a rank fails the
    others are ended (TERM, after 10 s KILL) and the traceback of the first is shown once. Ctrl-C and TERM reach the
    ranks, and the ranks die with this process even when it is killed.

    Args:
        argv: what follows the interpreter, e.g. ``["-m", "rl3d", "train", "run.yaml"]``.
        nproc: number of ranks.
        log_dir: directory of the logs (made if absent); None keeps no logs.
        env: the environment of the ranks; None takes this process's.
    """
    result = run_local(argv, nproc, log_dir=log_dir, env=env, echo=sys.stdout)
    if result.code != 0 and result.reason:
        # Rank 0's own traceback has already passed through to the terminal.
        if result.traceback and result.failed_rank != 0:
            print(result.traceback.rstrip(), file=sys.stderr)
        where = f" (logs: {log_dir})" if log_dir is not None else ""
        print(f"rl3d: {result.reason}{where}", file=sys.stderr, flush=True)
    return result.code


def run_local(
    argv: Sequence[str],
    nproc: int,
    *,
    log_dir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    echo: IO[str] | None = None,
    timeout_s: float | None = None,
) -> JobResult:
    """As :func:`launch_local`, but reports failures in its result and prints only rank 0's output, to ``echo``."""
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: expected at least 1 rank")
    with tempfile.TemporaryDirectory(prefix="rl3d-ranks-") as scratch:
        logs = Path(log_dir) if log_dir is not None else Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        job = _Job(list(argv), nproc, logs, Path(scratch) / "failure.json", dict(os.environ if env is None else env))
        return job.run(echo, timeout_s)


class LocalJob:
    """The ranks of a job beside a process that goes on with its own work, as a notebook does.

    A thread watches them as :func:`run_local` does; they die with this process, however it ends.

    Args:
        argv, nproc, env, echo: as in :func:`run_local`.
    """

    def __init__(
        self, argv: Sequence[str], nproc: int, *, env: Mapping[str, str] | None = None, echo: IO[str] | None = None
    ):
        self._scratch = tempfile.TemporaryDirectory(prefix="rl3d-ranks-")
        logs = Path(self._scratch.name)
        self._job = _Job(list(argv), nproc, logs, logs / "failure.json", dict(os.environ if env is None else env))
        self._result: JobResult | None = None
        self._echo = echo
        # The kernel ties a child's life to the thread that starts it: this one lives as long as the ranks do.
        self._thread = threading.Thread(target=self._run, name="rl3d-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._job.run(self._echo, None)
        except Exception as error:
            self._result = JobResult(1, None, f"the ranks could not be started: {type(error).__name__}: {error}")
        finally:
            self._scratch.cleanup()

    def poll(self) -> JobResult | None:
        """How the job ended, or ``None`` while it runs."""
        return self._result

    def wait(self, timeout_s: float | None = None) -> JobResult | None:
        """As :meth:`poll`, after waiting for the end."""
        self._thread.join(timeout_s)
        return self._result

    def stop(self) -> None:
        """End the ranks: TERM, after 10 s KILL. Returns when they are gone; safe to call again."""
        self._job.signals.append(signal.SIGTERM)
        for process in self._job.ranks:
            if process.poll() is None:
                _signal_group(process, signal.SIGTERM)
        self._thread.join()


class _Job:
    def __init__(self, argv: list[str], nproc: int, logs: Path, failure: Path, env: dict[str, str]) -> None:
        self.argv, self.nproc, self.logs, self.failure, self.env = argv, nproc, logs, failure, env
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pumps: list[threading.Thread] = []
        self.signals: list[int] = []  # received from outside, in order

    def run(self, echo: IO[str] | None, timeout_s: float | None) -> JobResult:
        restore = self._forward_signals()
        try:
            self._start(echo)
            result = self._watch(timeout_s)
        finally:
            self._end()
            for pump in self.pumps:
                pump.join(timeout=2)
            restore()
        return result

    # ---- start

    def _start(self, echo: IO[str] | None) -> None:
        base = {
            **self.env,
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONUNBUFFERED": "1",
            FAILURE_FILE: str(self.failure),
        }
        if not base.get("OMP_NUM_THREADS"):  # must be there before the ranks import numpy or torch
            base["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // self.nproc))
        die_with_parent = _die_with_parent()
        for rank in range(self.nproc):
            env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = open(self.logs / f"rank{rank}.log", "wb", buffering=0)
            source, sink = (None, log.fileno()) if rank != 0 or echo is None else _channel(echo)
            try:
                process = subprocess.Popen(
                    [sys.executable, *self.argv],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group of its own: Ctrl-C reaches ranks through us only, once
                    preexec_fn=die_with_parent,
                )
            finally:
                if source is not None:
                    os.close(sink)
                else:
                    log.close()
            self.ranks.append(process)
            if source is not None and echo is not None:
                pump = threading.Thread(target=_pump, args=(source, log, echo), name="rank0-output", daemon=True)
                pump.start()
                self.pumps.append(pump)

    # ---- watch

    def _watch(self, timeout_s: float | None) -> JobResult:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            codes = [process.poll() for process in self.ranks]
            bad = [rank for rank, code in enumerate(codes) if code not in (None, 0, STOPPED)]
            ending = [number for number in self.signals if number in _ENDING]
            if ending:
                self._end(already_signalled=True)
                return JobResult(128 + ending[0], None, f"stopped by {signal.Signals(ending[0]).name}")
            if bad:
                time.sleep(0.1)  # ranks that fail together: let the first one's report arrive
                return self._failure(bad[0], codes[bad[0]] or 1)
            if all(code is not None for code in codes):
                return JobResult(STOPPED, None, "stopped as asked; the same command goes on") if any(codes) else JobResult(0)
            if end is not None and time.monotonic() > end:
                running = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                return JobResult(124, None, f"not finished after {timeout_s:.0f} s; still running: rank(s) {running}")
            time.sleep(0.05)

    def _failure(self, rank: int, code: int) -> JobResult:
        try:
            report: dict[str, Any] = json.loads(self.failure.read_text())
        except (OSError, ValueError):
            report = {}
        if report:
            rank = int(report["rank"])
            return JobResult(code if code > 0 else 1, rank, f"rank {rank} failed: {report['error']}", report["traceback"])
        if code < 0:
            name = _signal_name(-code)
            hint = " (out of memory? see `dmesg`)" if name == "SIGKILL" else ""
            return JobResult(128 - code, rank, f"rank {rank} was killed by {name}{hint}", "")
        text = _last_traceback(self.logs / f"rank{rank}.log")
        return JobResult(code, rank, f"rank {rank} failed with exit code {code}", text)

    # ---- end

    def _end(self, already_signalled: bool = False) -> None:
        """TERM to what still runs, KILL after a grace; a second Ctrl-C cuts the grace short."""
        alive = [process for process in self.ranks if process.poll() is None]
        if not already_signalled:
            for process in alive:
                _signal_group(process, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        seen = len(self.signals)
        while any(process.poll() is None for process in alive) and time.monotonic() < end and len(self.signals) == seen:
            time.sleep(0.02)
        for process in self.ranks:
            _signal_group(process, signal.SIGKILL)  # the whole group: a rank's own helpers go too
        for process in self.ranks:
            process.wait(timeout=10)

    def _forward_signals(self) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None  # signals are the main thread's; whoever runs us in a thread handles them

        def forward(number: int, frame: Any) -> None:
            self.signals.append(number)
            for process in self.ranks:
                if process.poll() is None:
                    _signal_group(process, number)

        before = {number: signal.signal(number, forward) for number in _FORWARDED}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore


def _die_with_parent() -> Callable[[], None] | None:
    """What a rank runs before exec, so that the kernel kills it when its launcher dies, however that happens."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded here: after the fork only a plain call is safe
    parent = os.getpid()
    kill, set_parent_death_signal = int(signal.SIGKILL), 1

    def before_exec() -> None:
        libc.prctl(set_parent_death_signal, kill)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return before_exec


def _channel(echo: IO[str]) -> tuple[int, int]:
    """(read end, write end) for rank 0's output: a terminal if ours is one, so that progress bars stay alive."""
    try:
        if echo.isatty():
            import fcntl
            import pty
            import termios

            source, sink = pty.openpty()
            size = fcntl.ioctl(echo.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(sink, termios.TIOCSWINSZ, size)
            return source, sink
    except (OSError, ValueError, ImportError):
        pass
    return os.pipe()


def _pump(source: int, log: IO[bytes], echo: IO[str]) -> None:
    with log, os.fdopen(source, "rb", buffering=0) as stream:
        while True:
            try:
                chunk = stream.read(65536)
            except OSError:  # a pseudo-terminal reports its end as an error
                return
            if not chunk:
                return
            log.write(chunk)
            try:
                echo.write(chunk.decode(errors="replace"))
                echo.flush()
            except (OSError, ValueError):
                pass  # our terminal has gone; the log still gets everything


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_traceback(path: Path) -> str:
    """The last traceback in a log, else its last lines."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    start = text.rfind("Traceback (most recent call last)")
    return text[start:] if start >= 0 else "\n".join(text.splitlines()[-20:])
