"""Scoring in threads while sampling goes on; a reward that fails costs its sample and never passes for a score of 0.

Time limits are kept by a clock beside the calls, not by signals, which work in the main thread only. Python cannot stop
a running call: one that is late is given up, its worker is replaced, and what it returns in the end is thrown away.
"""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards.functions import RewardError, RewardFunction, resolve_reward

logger = logging.getLogger(__name__)

_TRACEBACKS_KEPT = 4
"""Failed samples of a step that carry their traceback; the others only its last line."""


class RewardFailure(RuntimeError):
    """Too large a share of a step's samples could not be scored. Holds the first traceback."""


@dataclass(eq=False)
class _Job:
    """One sample on its way through all reward functions."""

    sample: Sample
    prompt: Prompt
    future: "Future[Sample]"
    scores: list[float | None]
    error: str | None = None


@dataclass(eq=False)
class _Call:
    """One function on one sample. ``settled`` once its outcome counts; whatever comes later is thrown away."""

    job: _Job
    index: int
    deadline: float = float("inf")
    settled: bool = False


@dataclass
class _Tally:
    scored: int = 0
    failed: int = 0
    timeouts: int = 0
    tracebacks: list[str] = field(default_factory=list)


class RewardRunner:
    """Scores samples with one or several reward functions, ``workers`` calls at a time.

    Args:
        functions: reward functions, or pairs of a function and its weight (default 1). A sample's score is the weighted
            sum. What :func:`rl3d.rewards.functions.resolve_reward` takes is taken.
        workers: concurrent calls.
        timeout_s: seconds for one call, counted from its start.
        max_failure_rate: a larger share of failed samples makes :meth:`check_failures` raise.

    ``scored_total`` and ``failed_total`` count samples over the runner's life.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        *,
        workers: int = 4,
        timeout_s: float = 30.0,
        max_failure_rate: float = 0.1,
    ):
        if not functions:
            raise RewardError("no reward function given; expected at least one")
        if workers < 1 or timeout_s <= 0:
            raise RewardError(f"reward workers={workers} must be at least 1 and timeout_s={timeout_s} greater than 0")
        pairs = [item if isinstance(item, tuple) else (item, 1.0) for item in functions]
        self.functions: list[RewardFunction] = [resolve_reward(function) for function, _ in pairs]
        self.weights = [float(weight) for _, weight in pairs]
        self.workers, self.timeout_s, self.max_failure_rate = workers, timeout_s, max_failure_rate
        self.scored_total = 0
        self.failed_total = 0
        self._lock = threading.Condition()
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: set[_Call] = set()
        self._step = _Tally()
        self._threads = 0
        self._closed = False
        self._clock: threading.Thread | None = None

    # ---- scoring

    def submit(self, sample: Sample, prompt: Prompt) -> "Future[Sample]":
        """Score ``sample`` in the background.

        The future holds a copy with ``score`` set, or with ``failed`` true, ``score`` None and ``info["error"]``. It
        raises nothing: look at ``failed``. ``info["rewards"]`` has the unweighted score of each of several functions.
        """
        job = _Job(sample, prompt, Future(), [None] * len(self.functions))
        with self._lock:
            if self._closed:
                raise RewardError("the reward runner is closed")
            self._start_threads()
        for index in range(len(self.functions)):
            self._inbox.put(_Call(job, index))
        return job.future

    def score(self, sample: Sample, prompt: Prompt) -> Sample:
        """:meth:`submit` and wait."""
        return self.submit(sample, prompt).result()

    def check_failures(self, samples: Sequence[Sample]) -> int:
        """Number of failed ones among a step's samples, which may come from other ranks' runners too.

        Call once per step, with the same samples on every rank, so that all ranks raise alike. Raises
        :class:`RewardFailure` with the first traceback when their share is above ``max_failure_rate``.
        """
        with self._lock:
            self._step = _Tally()
        failed = [s for s in samples if s.failed]
        if not failed:
            return 0
        first = next((s for s in failed if "traceback" in s.info), failed[0])
        reason = first.info.get("traceback") or first.info.get("error") or "no reason recorded"
        text = f"{len(failed)} of {len(samples)} samples could not be scored"
        if len(failed) > self.max_failure_rate * len(samples):
            raise RewardFailure(
                f"{text}, more than reward.max_failure_rate={self.max_failure_rate:g}; the first, {first.uid}:\n{reason}"
            )
        logger.warning("%s and are left out of the loss; the first, %s: %s", text, first.uid, first.info.get("error"))
        return len(failed)

    def close(self) -> None:
        """End the workers; samples that nobody has scored yet are marked failed."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        waiting = []
        while not self._inbox.empty():
            call = self._inbox.get()
            if call is not None:
                waiting.append(call)
        for call in waiting:
            self._settle(call, None, "the reward runner was closed")
        for _ in range(self._threads):
            self._inbox.put(None)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- threads (all daemons: a hanging reward must not keep the process alive)

    def _start_threads(self) -> None:
        while self._threads < self.workers:
            self._threads += 1
            threading.Thread(target=self._work, name="rl3d-reward", daemon=True).start()
        if self._clock is None:
            self._clock = threading.Thread(target=self._watch, name="rl3d-reward-clock", daemon=True)
            self._clock.start()

    def _work(self) -> None:
        while (call := self._inbox.get()) is not None:
            with self._lock:
                # A step in which nothing but time-outs happen would wait for each in turn: stop trying.
                hopeless = not self._step.scored and self._step.timeouts >= 4 * self.workers
                if not hopeless:
                    call.deadline = time.monotonic() + self.timeout_s
                    self._running.add(call)
                    self._lock.notify_all()
            if hopeless:
                self._settle(call, None, f"not tried after {self._step.timeouts} time-outs and no score")
                continue
            function = self.functions[call.index]
            try:
                score, error = function(call.job.sample, call.job.prompt), None
            except BaseException:  # whatever it is, it ends this sample and not this worker
                score, error = None, traceback.format_exc()
            if not self._settle(call, score, error):
                return  # given up while it ran; another worker has taken this one's place

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed and not self._running:
                    return
                now = time.monotonic()
                late = [call for call in self._running if call.deadline <= now]
                if not late:
                    soonest = min((call.deadline for call in self._running), default=None)
                    self._lock.wait(None if soonest is None else soonest - now)
                    continue
            for call in late:
                name = self.functions[call.index].name
                text = f"TimeoutError: reward {name} took more than reward.timeout_s={self.timeout_s:g} s"
                if self._settle(call, None, text, timeout=True) and not self._closed:
                    threading.Thread(target=self._work, name="rl3d-reward", daemon=True).start()

    def _settle(self, call: _Call, score: float | None, error: str | None, timeout: bool = False) -> bool:
        """Record the outcome of a call unless it has one already; resolves the sample after its last call."""
        job = call.job
        with self._lock:
            if call.settled:
                return False
            call.settled = True
            self._running.discard(call)
            self._step.timeouts += timeout
            self._step.scored += error is None
            if error is not None and job.error is None:
                job.error = error
                if "Traceback" in error and len(self._step.tracebacks) < _TRACEBACKS_KEPT:
                    self._step.tracebacks.append(error)
                    job.sample.info["traceback"] = error
            job.scores[call.index] = score
            done = job.error is not None or all(s is not None for s in job.scores)
            resolve = done and not job.future.done()
            if resolve:
                result = self._result(job)
                self.scored_total += not result.failed
                self.failed_total += result.failed
        if resolve:
            job.future.set_result(result)
        return True

    def _result(self, job: _Job) -> Sample:
        if job.error is not None:
            last_line = job.error.strip().splitlines()[-1]
            return replace(job.sample, score=None, failed=True, info={**job.sample.info, "error": last_line})
        scores = [s for s in job.scores if s is not None]
        total = sum(weight * score for weight, score in zip(self.weights, scores, strict=True))
        info = dict(job.sample.info)
        if len(scores) > 1:
            info["rewards"] = {function.name: score for function, score in zip(self.functions, scores)}
        return replace(job.sample, score=total, failed=False, info=info)


def as_runner(reward: "RewardRunner | Callable[..., Any] | str | Sequence[Any]", **settings: Any) -> RewardRunner:
    """A runner from whatever a user gives as reward: a runner, a function or import path, or several with weights."""
    if isinstance(reward, RewardRunner):
        return reward
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    return RewardRunner(list(reward) if several else [reward], **settings)  # type: ignore[arg-type]
