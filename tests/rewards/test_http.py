"""A reward over HTTP against a real server on loopback that fails in every way a service does."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl3d.data.batch import Prompt, Sample
from rl3d.rewards.functions import RewardError
from rl3d.rewards.http import HttpReward
from rl3d.rewards.runner import RewardFailure, RewardRunner

PROMPT = Prompt("0", 0, "What is 1 + 1?", None, [1], answer="2", data_source="sums", extra={"level": 3})


def sample(i, text=""):
    return Sample(f"0-{i}", 0, i, [1], [2], [0.0], "stop", text=text or str(i))


class Service:
    """Scores a response with the number that it is; ``behave(self, body)`` may answer in its place."""

    def __init__(self):
        self.bodies, self.headers, self.times = [], [], []
        self.connections = self.running = self.most_running = 0
        self.script = []  # for each request in turn: a function of the handler that answers it, or None
        self.pause = 0.0
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with service.lock:
                    service.connections += 1

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.bodies.append(body)
                    service.headers.append(dict(self.headers))
                    service.times.append(time.monotonic())
                    service.running += 1
                    service.most_running = max(service.most_running, service.running)
                    act = service.script.pop(0) if service.script else None
                time.sleep(service.pause)
                try:
                    if act is None:
                        self.answer(200, {"scores": [float(s["response"]) for s in body["samples"]]})
                    else:
                        act(self)
                except OSError:  # the client has left
                    self.close_connection = True
                finally:
                    with service.lock:
                        service.running -= 1

            def answer(self, status, value, **headers):
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name.replace("_", "-"), text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/score?v=1"


@pytest.fixture
def service():
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


def says(status, value=b"", **headers):
    return lambda handler: handler.answer(status, value, **headers)


def hangs_up(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def breaks_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores"')
    hangs_up(handler)


def trickles(handler):
    """Each byte comes soon, the answer as a whole does not."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def score(reward, *samples):
    return reward.scores([(s, PROMPT) for s in samples])


def test_the_contract(service, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    reward = HttpReward(service.url, headers={"Authorization": "Bearer ${REWARD_KEY}"}, kwargs={"strict": True})
    assert score(reward, sample(1), sample(2, "2.5")) == [1.0, 2.5]
    assert service.bodies[0]["strict"] is True and service.headers[0]["Authorization"] == "Bearer s3cret"
    assert service.bodies[0]["samples"][0] == {
        "prompt": "What is 1 + 1?", "response": "1", "answer": "2", "data_source": "sums", "messages": None,
        "finish_reason": "stop", "level": 3,
    }  # fmt: skip
    with pytest.raises(RewardError, match="environment variable NOT_THERE"):
        HttpReward(service.url, headers={"X": "${NOT_THERE}"})


def test_connections_are_kept_and_requests_bounded(service):
    service.pause = 0.03
    with RewardRunner([HttpReward(service.url, concurrency=3)]) as runner:
        out = [future.result(timeout=60) for future in [runner.submit(sample(i), PROMPT) for i in range(24)]]
    assert [s.score for s in out] == [float(i) for i in range(24)]
    assert len(service.bodies) == 24 and service.most_running == 3 and service.connections == 3


def test_a_request_takes_what_waits(service):
    service.pause = 0.05
    with RewardRunner([HttpReward(service.url, concurrency=1, batch_size=8)]) as runner:
        out = [future.result(timeout=60) for future in [runner.submit(sample(i), PROMPT) for i in range(17)]]
    assert [s.score for s in out] == [float(i) for i in range(17)]
    sizes = [len(body["samples"]) for body in service.bodies]
    assert sum(sizes) == 17 and max(sizes) == 8 and len(sizes) <= 4


@pytest.mark.parametrize(
    "failure", [says(503), says(500, b"oops"), says(429), hangs_up, breaks_off, trickles, lambda handler: time.sleep(1.5)],
    ids=["503", "500", "429", "hangs up", "breaks off", "trickles", "late"],
)  # fmt: skip
def test_what_passes_is_tried_again(service, failure):
    service.script = [failure, failure]
    reward = HttpReward(service.url, timeout_s=1.0, backoff_s=0.02)
    assert score(reward, sample(7)) == [7.0]
    assert len(service.bodies) >= 3 and all(body == service.bodies[0] for body in service.bodies)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(400, b"no such field"), "HTTP 400: 'no such field'"),
        (says(401), "HTTP 401"),
        (says(404), "HTTP 404"),
        (says(307, Location="/other"), "HTTP 307"),
        (says(200, b"<html>"), "not JSON"),
        (says(200, {"scores": [1, 2]}), "with 1 entries"),
        (says(200, {"score": 1}), "with 1 entries"),
    ],
)
def test_what_will_not_pass_is_final(service, answer, words):
    service.script = [answer]
    with pytest.raises(RewardError, match=words):
        score(HttpReward(service.url), sample(1))
    assert len(service.bodies) == 1
    assert score(HttpReward(service.url), sample(1)) == [1.0]


def test_a_sample_without_a_score_fails_alone(service):
    service.script = [says(200, b'{"scores": [0.5, null, NaN, "1", 2]}')]
    first, *failed, last = score(HttpReward(service.url), *(sample(i) for i in range(5)))
    assert (first, last) == (0.5, 2.0) and all(isinstance(error, RewardError) for error in failed)
    service.script = [says(200, {"scores": [None]})]
    with RewardRunner([HttpReward(service.url)]) as runner:
        out = runner.score(sample(1), PROMPT)
    assert out.failed and out.score is None and "has no score for sample 0-1" in out.info["error"]


def test_pauses_grow_vary_and_heed_retry_after(service):
    service.script = [says(503)] * 3
    score(HttpReward(service.url, backoff_s=0.1), sample(1))
    pauses = [after - before for before, after in zip(service.times, service.times[1:])]
    for pause, full in zip(pauses, (0.1, 0.2, 0.4)):
        assert full / 2 <= pause < full + 2
    service.script, service.times = [says(429, Retry_After="1")], []
    score(HttpReward(service.url, backoff_s=0.01), sample(1))
    assert 1 <= service.times[1] - service.times[0] < 5
    times = []
    for _ in range(4):
        service.script, service.times = [says(503)], []
        score(HttpReward(service.url, backoff_s=0.2), sample(1))
        times.append(service.times[1] - service.times[0])
    assert max(times) - min(times) > 0.005, "workers must not come back in step"


def test_a_connection_closed_while_idle_costs_no_attempt(service):
    reward = HttpReward(service.url, retries=0)

    def answers_then_closes(handler):
        handler.answer(200, {"scores": [1.0]})
        hangs_up(handler)

    service.script = [answers_then_closes]
    assert score(reward, sample(1)) == [1.0]
    time.sleep(0.05)
    assert score(reward, sample(2)) == [2.0]


def test_a_service_that_is_down_ends_the_run_soon_and_scores_nothing():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    start = time.monotonic()
    with RewardRunner([HttpReward(url, retries=2, backoff_s=0.05, concurrency=2)]) as runner:
        out = [future.result(timeout=60) for future in [runner.submit(sample(i), PROMPT) for i in range(200)]]
        assert all(s.failed and s.score is None for s in out)
        assert "3 attempts failed, the last with ConnectionRefusedError" in out[0].info["error"]
        assert "not tried" in out[-1].info["error"], "a step does not wait for each of 200"
        with pytest.raises(RewardFailure, match="200 of 200 samples could not be scored"):
            runner.check_failures(out)
    assert time.monotonic() - start < 60


def test_a_slow_service_keeps_no_function_waiting(service):
    release, done = threading.Event(), threading.Event()
    seen = []

    def waits(handler):
        release.wait(20)
        handler.answer(200, {"scores": [2.0]})

    def quick(response):
        seen.append(response)
        if len(seen) == 3:
            done.set()
        return 1.0

    service.script = [waits] * 3
    with RewardRunner([(HttpReward(service.url, concurrency=1), 2.0), quick], workers=1) as runner:
        futures = [runner.submit(sample(i), PROMPT) for i in range(3)]
        assert done.wait(20) and not any(future.done() for future in futures)
        release.set()
        out = [future.result(timeout=60) for future in futures]
    assert [s.score for s in out] == [5.0, 5.0, 5.0]
    assert out[2].info["rewards"] == {service.url: 2.0, "quick": 1.0}
