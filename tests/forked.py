"""Ranks forked from one process that has imported the libraries: each then costs milliseconds instead of six CPU seconds.

The process has one thread and no process group, so a forked rank is as fresh as a started one, except that it shares the
seed of Python's hashes with the others. Run as ``python -m tests.forked``: a JSON object with the arguments of
:func:`rl3d.distributed.launcher.run_local` on each line of its input, a result on each line of its output.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl3d.distributed import launcher, platform

ROOT = Path(__file__).resolve().parent.parent


class ForkServer:
    """The process, seen from the tests. Started at the first use; it and all that it forked end with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, argv: Sequence[str], nproc: int, log_dir: str, env: Mapping[str, str], timeout_s: float
    ) -> launcher.JobResult:
        """As :func:`rl3d.distributed.launcher.run_local`, for ``argv = ["-m", "tests.ranks", ...]``."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked"], cwd=ROOT, env={**os.environ, **env}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
            atexit.register(self._process.kill)
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"argv": list(argv), "nproc": nproc, "log_dir": log_dir, "env": dict(env), "timeout_s": timeout_s}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BaseException:  # interrupted: what runs is of no use any more
            self._process.kill()
            raise
        if not answer:
            raise RuntimeError("the process that ranks are forked from has died")
        return launcher.JobResult(**json.loads(answer))


class _ForkedRank:
    """As much of ``subprocess.Popen`` as the launcher uses."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: int, preexec_fn: Callable[[], None] | None,
                 **_: Any) -> None:  # fmt: skip
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(command[3:], env, stdout, preexec_fn)
        with contextlib.suppress(PermissionError):
            os.setpgid(self.pid, self.pid)  # before anyone signals the group; the rank does the same

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked rank", timeout)
            time.sleep(0.01)
        return code


def _become_rank(words: list[str], env: dict[str, str], output: int, preexec_fn: Callable[[], None] | None) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        if preexec_fn is not None:
            preexec_fn()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        launcher.subprocess = subprocess  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        from tests.ranks import main

        main(*words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def _import_libraries() -> None:
    platform.prepare()
    import deepspeed  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import rl3d.engine.actor
    import rl3d.trainer.trainer  # noqa: F401


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    _import_libraries()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after importing the libraries; ranks can be forked from one thread only")
    for line in sys.stdin:
        job = os.fork()
        if job == 0:
            _die_with_parent()
            launcher.subprocess = SimpleNamespace(Popen=_ForkedRank, DEVNULL=None, STDOUT=None)  # type: ignore[attr-defined]
            code = 1
            try:
                result = launcher.run_local(**json.loads(line))
                print(json.dumps(dataclasses.asdict(result)), file=answers, flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
        if code:
            failed = launcher.JobResult(1, None, f"the launcher of the forked ranks ended with {code}")
            print(json.dumps(dataclasses.asdict(failed)), file=answers, flush=True)


if __name__ == "__main__":
    main()
