"""One Python session, a notebook for instance, drives the ranks of a job on its machine.

The session starts the ranks (:mod:`rl3d.distributed.session_rank`) and sends each of them the same call; functions that it
lends them run here. Nothing that happens to the session leaves ranks behind: they die with it.

Ranks connect to a socket of this host that only those who know a secret can use; calls, results and what is lent travel
pickled.
"""

import atexit
import inspect
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import IO, Any

from rl3d.distributed.launcher import LocalJob

ADDRESS, KEY, SETTINGS = "RL3D_SESSION_ADDRESS", "RL3D_SESSION_KEY", "RL3D_SESSION_SETTINGS"
GRACE_S = 60.0  # after one rank has raised, how long the others may take to come to an end


class SessionError(RuntimeError):
    """The ranks of a session have ended, or an error of theirs that cannot be brought here as it is."""


class RankTraceback(Exception):
    """The traceback of an error on a rank, as its text; the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a value, or an error with its traceback."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""

    @classmethod
    def of(cls, error: BaseException, text: str) -> "Answer":
        """An error; one that cannot travel becomes a :class:`SessionError` of the same words."""
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = SessionError(f"{type(error).__name__}: {error}")
        return cls(error=error, text=text)


class Session:
    """``nproc`` ranks that wait for calls. Closes an earlier session of this process first: they would share its devices.

    Args:
        nproc: number of ranks.
        device, timeout_s: as for :func:`rl3d.distributed.bootstrap.init`.
        env: the environment of the ranks; by default this process's.
        echo: where rank 0's output goes.

    Raises:
        SessionError: the ranks did not come up, with the reason.
    """

    def __init__(self, nproc: int, *, device: str = "auto", timeout_s: float = 600, env: Mapping[str, str] | None = None,
                 echo: IO[str] | None = None) -> None:  # fmt: skip
        global _open
        if _open is not None and (earlier := _open()) is not None:
            earlier.close()
        self.nproc = nproc
        self._lock = threading.Lock()
        self._reason = ""
        self._desk = _Desk()
        root = str(Path(__file__).resolve().parents[2])
        settings = {
            **(os.environ if env is None else env),
            ADDRESS: ":".join(map(str, self._desk.address)), KEY: self._desk.key.hex(), SETTINGS: f"{device} {timeout_s}",
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        argv = ["-m", "rl3d.distributed.session_rank"]
        self._job = LocalJob(argv, nproc, env=settings, echo=sys.stdout if echo is None else echo)
        self._end = weakref.finalize(self, _end, self._job, self._desk)
        _open = weakref.ref(self)
        try:
            self._collect(time.monotonic() + timeout_s)  # each rank's first answer: it has met the others
        except BaseException:
            self.close()
            raise

    def call(self, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function`` ("package.module:name") on every rank; the results by rank.

        Raises:
            SessionError: the ranks have ended, or are waiting for the very function that calls.
            KeyboardInterrupt: Ctrl-C; the ranks are in the middle of something and are ended.
            Exception: what the first rank raised, its traceback as the cause. The session goes on if all ranks came to an
                end of the call; otherwise the ranks are ended.
        """
        if getattr(_threads, "serving", False):
            raise SessionError(f"{function}: called by a function that the ranks are waiting for; call it from elsewhere")
        request = pickle.dumps((function, args, kwargs))
        with self._lock:
            self._check()
            try:
                with suppress(OSError):  # a rank that has gone is noticed by what it does not answer
                    for rank in range(self.nproc):
                        self._desk.ranks[rank].send_bytes(request)
                return self._collect(None)
            except KeyboardInterrupt:
                self._stop("interrupted from the keyboard")
                raise

    def lend(self, function: Callable[..., Any]) -> "Lent":
        """A stand-in that ranks can call: the call runs here, in a thread, and its result goes back."""
        return self._desk.lend(function)

    def close(self) -> None:
        """End the ranks; safe to call again."""
        self._stop("closed")

    # ---- helpers

    def _collect(self, end: float | None) -> list[Any]:
        answers: dict[int, Answer] = {}
        while len(answers) < self.nproc:
            ranks = {connection: rank for rank, connection in list(self._desk.ranks.items()) if rank not in answers}
            for connection in wait(list(ranks), timeout=0.1) if ranks else ():
                rank = ranks[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._job.wait(2 * GRACE_S)  # the launcher finds out how it ended, and ends the others
                    self._stop(f"rank {rank} ended")
                    self._check()
            if not ranks:
                time.sleep(0.02)
            failed = [rank for rank, answer in answers.items() if answer.error is not None]
            if failed and end is None:
                end = time.monotonic() + GRACE_S
            if len(answers) < self.nproc and self._job.poll() is not None:
                self._stop("")
                self._check()
            if end is not None and time.monotonic() > end:
                silent = sorted(set(range(self.nproc)) - answers.keys())
                self._stop(f"rank(s) {', '.join(map(str, silent))} did not answer")
                break
        for rank in sorted(answers):
            if (error := answers[rank].error) is not None:
                raise error from RankTraceback(f"on rank {rank}:\n{answers[rank].text}")
        self._check()
        return [answers[rank].value for rank in range(self.nproc)]

    def _check(self) -> None:
        result = self._job.poll()
        if self._reason or result is not None:
            reason = self._reason or (result.reason if result is not None else "") or "they ended"
            text = f"\n{result.traceback}" if result is not None and result.traceback else ""
            raise SessionError(f"the ranks of this session are gone ({reason}); make a new actor{text}")

    def _stop(self, reason: str) -> None:
        result = self._job.poll()
        if not self._reason:
            self._reason = result.reason if result is not None and result.reason else reason
        self._end()


_open: weakref.ref[Session] | None = None


def _end(job: LocalJob, desk: "_Desk") -> None:
    desk.close()
    job.stop()


class _Desk:
    """Where ranks connect: one connection each for calls, others for what they call here. Knows nothing of the session."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self.ranks: dict[int, Connection] = {}
        self._functions: list[Callable[..., Any]] = []
        self._listener = Listener(("127.0.0.1", 0), backlog=128, authkey=self.key)
        self.address = self._listener.address
        self._closed = False
        threading.Thread(target=self._accept, name="rl3d-session", daemon=True).start()

    def lend(self, function: Callable[..., Any]) -> "Lent":
        self._functions.append(function)
        return Lent(len(self._functions) - 1, getattr(function, "__name__", type(function).__name__), _parameters(function))

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            socket.create_connection(self.address, timeout=1).close()  # wakes the thread that accepts
        self._listener.close()
        for connection in self.ranks.values():
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection: Any = self._listener.accept()
                if self._closed:
                    return
                rank = pickle.loads(connection.recv_bytes())
            except (OSError, EOFError, AuthenticationError):
                continue
            if rank is None:
                threading.Thread(target=self._serve, args=(connection,), name="rl3d-lent", daemon=True).start()
            else:
                self.ranks[rank] = connection

    def _serve(self, connection: Connection) -> None:
        _threads.serving = True
        with connection:
            while True:
                try:
                    number, args, kwargs = pickle.loads(connection.recv_bytes())
                except (OSError, EOFError):
                    return
                answer = answer_of(lambda: self._functions[number](*args, **kwargs))  # noqa: B023
                try:
                    data = pickle.dumps(answer)
                except Exception as error:
                    data = pickle.dumps(Answer(error=TypeError(f"the result cannot be sent to a rank: {error}")))
                connection.send_bytes(data)


class Lent:
    """A function of the session, on a rank. Pickled, it is a number; its parameters are those of the original."""

    def __init__(self, number: int, name: str, parameters: tuple[tuple[str, int, bool], ...] | None) -> None:
        self._number, self._parameters, self.__name__ = number, parameters, name
        if parameters is not None:
            self.__signature__ = inspect.Signature(
                [
                    inspect.Parameter(name, inspect._ParameterKind(kind), default=None if has_default else inspect._empty)
                    for name, kind, has_default in parameters
                ]  # fmt: skip
            )

    def __reduce__(self) -> Any:
        return Lent, (self._number, self.__name__, self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        connection = getattr(_threads, "connection", None)
        if connection is None:
            connection = _threads.connection = connect(None)
        connection.send_bytes(pickle.dumps((self._number, args, kwargs)))
        answer = pickle.loads(connection.recv_bytes())
        if answer.error is not None:
            raise answer.error from RankTraceback(f"in the session:\n{answer.text}")
        return answer.value


_threads = threading.local()  # on a rank: each thread's own connection for what was lent; here: who serves one


def connect(rank: int | None) -> Connection:
    """On a rank: a connection to the session, for calls (with the rank) or for what was lent (``None``)."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    connection: Any = Client((host, int(port)), authkey=bytes.fromhex(os.environ[KEY]))
    connection.send_bytes(pickle.dumps(rank))
    return connection


def answer_of(run: Callable[[], Any]) -> Answer:
    """The result of a call, or its error."""
    import traceback

    try:
        return Answer(run())
    except Exception as error:
        return Answer.of(error, traceback.format_exc())


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, int, bool], ...] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return None
    return tuple((p.name, int(p.kind), p.default is not inspect.Parameter.empty) for p in found)


@atexit.register
def _close_open() -> None:
    if _open is not None and (session := _open()) is not None:
        session.close()
