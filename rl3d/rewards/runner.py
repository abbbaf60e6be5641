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
from typing import Any, Protocol

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards.functions import RewardError, RewardFunction, resolve_reward
from rl3d.rewards.http import RewardUnavailable

logger = logging.getLogger(__name__)

_TRACEBACKS_KEPT = 4
"""Failed samples of a step that carry their traceback; the others only its last line."""


class RewardFailure(RuntimeError):
    """Too large a share of a step's samples could not be scored. Holds the first traceback."""


class Scorer(Protocol):
    """A reward with threads of its own, such as :class:`~rl3d.rewards.http.HttpReward` and
    :class:`~rl3d.rewards.models.ModelReward`, which therefore never keeps the functions waiting.

    ``workers`` calls run at a time, each with up to ``batch_size`` samples; one that is not back after ``timeout_s`` is
    given up. With ``at_boundary`` it gets all samples at once when sampling is over, in the main thread.
    """

    name: str
    workers: int
    batch_size: int
    timeout_s: float

    @property
    def at_boundary(self) -> bool: ...

    def scores(self, pairs: Sequence[tuple[Sample, Prompt]]) -> Sequence[float | Exception]:
        """A score for each sample, or the reason why there is none; an exception raised concerns all of them."""
        ...


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
    lane: "_Lane"
    deadline: float = float("inf")
    settled: bool = False


@dataclass(eq=False)
class _Lane:
    """Threads with an inbox: one for all functions, one for each :class:`Scorer`. Counts are of the step."""

    workers: int
    batch_size: int
    timeout_s: float
    patience: int  # time-outs without any score after which a step is not tried further: each would be waited for in turn
    inbox: "queue.SimpleQueue[_Call | None]" = field(default_factory=queue.SimpleQueue)
    threads: int = 0
    scored: int = 0
    timeouts: int = 0

    def take(self, first: _Call) -> list[_Call]:
        """``first`` and what waits behind it, up to a batch."""
        calls = [first]
        while len(calls) < self.batch_size:
            try:
                call = self.inbox.get_nowait()
            except queue.Empty:
                break
            if call is None:  # the word to stop is for whoever comes next
                self.inbox.put(None)
                break
            calls.append(call)
        return calls


class RewardRunner:
    """Scores samples with one or several reward functions, ``workers`` calls at a time.

    Args:
        functions: rewards, or pairs of a reward and its weight (default 1). A sample's score is the weighted sum. What
            :func:`rl3d.rewards.functions.resolve_reward` takes is taken, and a :class:`Scorer`.
        workers: concurrent calls of functions.
        timeout_s: seconds for one call of a function, counted from its start.
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
        every = [(resolve_reward(function), float(weight)) for function, weight in pairs]
        beside = [pair for pair in every if isinstance(pair[0], RewardFunction) or not pair[0].at_boundary]
        self.functions: list[RewardFunction | Scorer] = [function for function, _ in beside]
        self.weights = [weight for _, weight in beside]
        self.at_boundary: list[tuple[Scorer, float]] = [pair for pair in every if pair not in beside]
        self._several = len(every) > 1
        shared = _Lane(workers, 1, timeout_s, patience=4 * workers)
        self._lane_of = [
            shared if isinstance(f, RewardFunction) else _Lane(f.workers, f.batch_size, f.timeout_s, patience=f.workers)
            for f in self.functions
        ]
        self._lanes = list(dict.fromkeys(self._lane_of))
        self.workers, self.timeout_s, self.max_failure_rate = workers, timeout_s, max_failure_rate
        self.scored_total = 0
        self.failed_total = 0
        self._lock = threading.Condition()
        self._running: set[_Call] = set()
        self._tracebacks = 0
        self._closed = False
        self._clock: threading.Thread | None = None

    # ---- scoring

    def submit(self, sample: Sample, prompt: Prompt) -> "Future[Sample]":
        """Score ``sample`` in the background.

        The future holds a copy with ``score`` set, or with ``failed`` true, ``score`` None and ``info["error"]``. It
        raises nothing: look at ``failed``. ``info["rewards"]`` has the unweighted score of each of several functions.
        Rewards ``at_boundary`` are not in it yet: :meth:`finish` adds them.
        """
        job = _Job(sample, prompt, Future(), [None] * len(self.functions))
        with self._lock:
            if self._closed:
                raise RewardError("the reward runner is closed")
            self._start_threads()
        for index, lane in enumerate(self._lane_of):
            lane.inbox.put(_Call(job, index, lane))
        if not self.functions:
            self.scored_total += 1
            job.future.set_result(self._result(job))
        return job.future

    def score(self, sample: Sample, prompt: Prompt) -> Sample:
        """:meth:`submit` and wait."""
        return self.finish([self.submit(sample, prompt).result()], [prompt])[0]

    def finish(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
        """Add the rewards that run ``at_boundary``, in the order in which they were given, to scored samples.

        ``prompts`` are those of the samples, each once, in any order. What fails here is marked like any other failure.
        """
        out = list(samples)
        of = {prompt.uid: prompt for prompt in prompts}
        for scorer, weight in self.at_boundary:
            rows = [index for index, sample in enumerate(out) if not sample.failed]
            pairs = [(out[index], of[out[index].uid.rsplit("-", 1)[0]]) for index in rows]
            for index, outcome in zip(rows, self._outcomes(scorer, pairs), strict=True):
                out[index] = self._add(out[index], scorer.name, weight, outcome)
        return out

    @staticmethod
    def _outcomes(scorer: Scorer, pairs: Sequence[tuple[Sample, Prompt]]) -> Sequence[float | Exception]:
        try:
            return scorer.scores(pairs) if pairs else []
        except Exception as error:
            return [error] * len(pairs)

    def _add(self, sample: Sample, name: str, weight: float, outcome: float | Exception) -> Sample:
        info = dict(sample.info)
        if isinstance(outcome, Exception):
            with self._lock:
                self.scored_total -= 1
                self.failed_total += 1
            info |= {"error": f"{type(outcome).__name__}: {outcome}"}
            return replace(sample, score=None, failed=True, info=info)
        if self._several:
            info["rewards"] = {**info.get("rewards", {}), name: outcome}
        return replace(sample, score=(sample.score or 0.0) + weight * outcome, info=info)

    def check_failures(self, samples: Sequence[Sample]) -> int:
        """Number of failed ones among a step's samples, which may come from other ranks' runners too.

        Call once per step, with the same samples on every rank, so that all ranks raise alike. Raises
        :class:`RewardFailure` with the first traceback when their share is above ``max_failure_rate``.
        """
        with self._lock:
            self._tracebacks = 0
            for lane in self._lanes:
                lane.scored = lane.timeouts = 0
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
        for lane in self._lanes:
            waiting = []
            while not lane.inbox.empty():
                call = lane.inbox.get()
                if call is not None:
                    waiting.append(call)
            for call in waiting:
                self._settle(call, None, "the reward runner was closed")
            for _ in range(lane.threads):
                lane.inbox.put(None)

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- threads (all daemons: a hanging reward must not keep the process alive)

    def _start_threads(self) -> None:
        for lane in self._lanes:
            while lane.threads < lane.workers:
                lane.threads += 1
                threading.Thread(target=self._work, args=(lane,), name="rl3d-reward", daemon=True).start()
        if self._clock is None:
            self._clock = threading.Thread(target=self._watch, name="rl3d-reward-clock", daemon=True)
            self._clock.start()

    def _work(self, lane: _Lane) -> None:
        while (first := lane.inbox.get()) is not None:
            calls = lane.take(first)
            with self._lock:
                hopeless = not lane.scored and lane.timeouts >= lane.patience
                if not hopeless:
                    for call in calls:
                        call.deadline = time.monotonic() + lane.timeout_s
                        self._running.add(call)
                    self._lock.notify_all()
            if hopeless:
                for call in calls:
                    self._settle(call, None, f"not tried after {lane.timeouts} time-outs and no score")
                continue
            stale = False
            for call, (score, error, unavailable) in zip(calls, self._outcome(calls), strict=True):
                stale |= not self._settle(call, score, error, timeout=unavailable and call is first)
            if stale:
                return  # given up while it ran; another worker has taken this one's place

    def _outcome(self, calls: Sequence[_Call]) -> list[tuple[float | None, str | None, bool]]:
        """For each call its score, or what went wrong and whether that was a service out of reach."""
        function = self.functions[calls[0].index]
        try:
            if isinstance(function, RewardFunction):
                return [(function(call.job.sample, call.job.prompt), None, False) for call in calls]
            found = function.scores([(call.job.sample, call.job.prompt) for call in calls])
        except RewardUnavailable as error:
            return [(None, f"RewardUnavailable: {error}", True)] * len(calls)
        except BaseException:  # whatever it is, it ends these samples and not this worker
            return [(None, traceback.format_exc(), False)] * len(calls)
        return [
            (None, f"{type(value).__name__}: {value}", False) if isinstance(value, Exception) else (value, None, False)
            for value in found
        ]

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed and not self._running:
                    return
                now = time.monotonic()
                late = [call for call in self._running if call.deadline <= now]
                if not late:
                    soonest = min((call.deadline for call in self._running), default=None)
                    self._lock.wait(None if soonest in (None, float("inf")) else soonest - now)
                    continue
            for call in late:
                name = self.functions[call.index].name
                text = f"TimeoutError: reward {name} took more than reward.timeout_s={call.lane.timeout_s:g} s"
                if self._settle(call, None, text, timeout=True) and not self._closed:
                    threading.Thread(target=self._work, args=(call.lane,), name="rl3d-reward", daemon=True).start()

    def _settle(self, call: _Call, score: float | None, error: str | None, timeout: bool = False) -> bool:
        """Record the outcome of a call unless it has one already; resolves the sample after its last call."""
        job = call.job
        with self._lock:
            if call.settled:
                return False
            call.settled = True
            self._running.discard(call)
            call.lane.timeouts += timeout
            call.lane.scored += error is None
            if error is not None and job.error is None:
                job.error = error
                if "Traceback" in error and self._tracebacks < _TRACEBACKS_KEPT:
                    self._tracebacks += 1
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
        if self._several and scores:
            info["rewards"] = {function.name: score for function, score in zip(self.functions, scores)}
        return replace(job.sample, score=total, failed=False, info=info)


def as_runner(reward: "RewardRunner | Callable[..., Any] | str | Sequence[Any]", **settings: Any) -> RewardRunner:
    """A runner from whatever a user gives as reward: a runner, a function or import path, or several with weights."""
    if isinstance(reward, RewardRunner):
        return reward
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    return RewardRunner(list(reward) if several else [reward], **settings)  # type: ignore[arg-type]
