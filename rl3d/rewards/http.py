"""A reward that a service computes: JSON over HTTP, with bounded concurrency, retries and connections kept open.

The request is ``POST url`` with::

    {"samples": [{"prompt": ..., "response": ..., "answer": ..., "data_source": ..., "messages": ...,
                  "finish_reason": ..., and the other columns of the row}, ...]}

and what else ``kwargs`` says; the answer is ``{"scores": [0.5, null, ...]}``, one number for each sample in order, null
for a sample that cannot be scored. Such a sample is marked failed, and so are all of a request that fails for good:
never are they scored 0.
"""

import http.client
import json
import math
import os
import queue
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards.functions import RewardError, columns

_RETRIED = (429, *range(500, 600))


class RewardUnavailable(RewardError):
    """A service that did not answer, however often it was asked."""


class HttpReward:
    """Asks a service for scores.

    Args:
        url: http:// or https://. Proxies are not used.
        timeout_s: seconds for one attempt, from connecting to the last byte.
        retries: further attempts after a time-out, a broken connection, 429 or 5xx; other answers are final.
        concurrency: requests at one time.
        batch_size: samples in one request, at most; a request takes what waits and does not wait for more.
        headers: sent with each request; ``${NAME}`` in a value is the environment variable NAME.
        kwargs: what else the body holds.
        backoff_s: pause before the first retry; doubled before each further one, up to 30 s, and drawn from half of that
            to the whole. A ``Retry-After`` header wins where it asks for longer, up to 60 s.
    """

    at_boundary = False

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        retries: int = 3,
        concurrency: int = 8,
        batch_size: int = 1,
        headers: Mapping[str, str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        backoff_s: float = 0.5,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(f"reward url {url!r}: expected http://host[:port]/path or https://...")
        if timeout_s <= 0 or retries < 0 or concurrency < 1 or batch_size < 1:
            raise RewardError(
                f"reward {url}: timeout_s={timeout_s} must be greater than 0, retries={retries} not negative, "
                f"concurrency={concurrency} and batch_size={batch_size} at least 1"
            )
        self.name = self.url = url
        self.workers, self.batch_size, self.retries = concurrency, batch_size, retries
        self.attempt_s, self.backoff_s = timeout_s, backoff_s
        self.timeout_s = math.inf  # each attempt has its limit; nothing else ends a request that still may succeed
        self.kwargs = dict(kwargs or {})
        self.headers = {name: _expand(value, url) for name, value in (headers or {}).items()}
        secure = parts.scheme == "https"
        host, port = parts.hostname, parts.port or (443 if secure else 80)
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(host, port, timeout=timeout_s)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # A slot for each request that may run, with the connection left open by the last one.
        self._slots: queue.LifoQueue[http.client.HTTPConnection | None] = queue.LifoQueue()
        for _ in range(concurrency):
            self._slots.put(None)

    def scores(self, pairs: Sequence[tuple[Sample, Prompt]]) -> list[float | Exception]:
        """A score for each sample, or the reason why there is none.

        Raises:
            RewardUnavailable: the service could not be reached, or had nothing but 429 and 5xx.
            RewardError: it refused the request, or its answer is not what was agreed.
        """
        body = json.dumps({"samples": [_row(*pair) for pair in pairs], **self.kwargs}, default=str).encode()
        answer = self._ask(body)
        found = answer.get("scores") if isinstance(answer, dict) else answer
        if not isinstance(found, list) or len(found) != len(pairs):
            raise RewardError(
                f'reward {self.url}: expected {{"scores": [...]}} with {len(pairs)} entries, got {_short(answer)}'
            )
        return [self._score(value, sample) for value, (sample, _) in zip(found, pairs)]

    def _score(self, value: Any, sample: Sample) -> float | Exception:
        if value is None:
            return RewardError(f"reward {self.url} has no score for sample {sample.uid}")
        if not isinstance(value, int | float) or not math.isfinite(value):
            return RewardError(f"reward {self.url} returned {value!r} for sample {sample.uid}; expected a finite number")
        return float(value)

    def _ask(self, body: bytes) -> Any:
        problem, asked_to_wait = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                pause = min(30.0, self.backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                time.sleep(max(pause, asked_to_wait))
                asked_to_wait = 0.0
            try:
                status, content, retry_after = self._post(body)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                try:
                    return json.loads(content)
                except ValueError as error:
                    raise RewardError(f"reward {self.url}: not JSON: {error}; got {_short(content)}") from None
            problem = f"HTTP {status}: {_short(content)}"
            if status not in _RETRIED:
                raise RewardError(f"reward {self.url}: {problem}")
            asked_to_wait = min(60.0, retry_after)
        raise RewardUnavailable(f"reward {self.url}: {self.retries + 1} attempts failed, the last with {problem}")

    def _post(self, body: bytes) -> tuple[int, bytes, float]:
        kept = self._slots.get()
        connection = kept
        try:
            try:
                connection = kept or self._connect()
                response, deadline = self._send(connection, body)
            except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
                if kept is None:
                    raise
                kept.close()  # the service closed it while it was idle: not a failure, a fresh one does
                connection = self._connect()
                response, deadline = self._send(connection, body)
            content = b""
            while chunk := response.read1(1 << 16):
                content += chunk
                self._limit(connection, deadline)
            if response.length:
                raise http.client.IncompleteRead(content, response.length)
            response.close()  # read to its end: the connection takes the next request
            if response.will_close:
                connection.close()
                connection = None
            wait = response.headers.get("Retry-After", "")
            return response.status, content, float(wait) if wait.isdigit() else 0.0
        except BaseException:
            if connection is not None:
                connection.close()
            connection = None
            raise
        finally:
            self._slots.put(connection)

    def _send(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[http.client.HTTPResponse, float]:
        deadline = time.monotonic() + self.attempt_s
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        if connection.sock is not None:
            connection.sock.settimeout(self.attempt_s)
        connection.request("POST", self._target, body, headers)
        self._limit(connection, deadline)
        return connection.getresponse(), deadline

    def _limit(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no complete answer within {self.attempt_s:g} s")
        if connection.sock is not None:
            connection.sock.settimeout(left)


def _row(sample: Sample, prompt: Prompt) -> dict[str, Any]:
    row = columns(sample, prompt)
    return {name: value for name, value in row.items() if name not in ("prompt_ids", "response_ids")}


def _expand(value: str, url: str) -> str:
    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise RewardError(f"reward {url}: a header asks for the environment variable {match[1]}, which is not set")
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", variable, value)


def _short(content: Any) -> str:
    text = content.decode(errors="replace") if isinstance(content, bytes) else json.dumps(content)
    return repr(text if len(text) <= 200 else text[:200] + "...")
