"""Results one by one, as sequences end."""

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl3d.generation.engine import GenerationEngine, GenerationError, OnStep, Request, Result


def stream(engine: GenerationEngine, requests: Sequence[Request], on_step: OnStep | None = None) -> Iterator[Result]:
    """Yield each result of ``engine.generate(requests)`` the moment its sequence ends, ``result.request_id`` naming it.

    The engine runs in a thread of its own meanwhile. Leaving the loop early aborts what is still running and waits for
    it. All ranks of a replica make the same call; one that leaves early is enough to end the others' requests.

    Raises:
        GenerationError: requests without names of which some have one; and what ``generate`` raises.
    """
    names = [request.request_id or str(index) for index, request in enumerate(requests)]
    if len(set(names)) < len(names):
        raise GenerationError("stream(): request ids are not unique; name all requests, or none")
    box: queue.Queue[Any] = queue.Queue()
    end = object()

    def run() -> None:
        try:
            device = getattr(engine, "device", None)
            if device is not None and torch.device(device).type == "cuda":
                torch.cuda.set_device(device)
            engine.generate(requests, box.put, on_step)
        except BaseException as error:  # carried to whoever reads
            box.put(error)
        box.put(end)

    worker = threading.Thread(target=run, name="rl3d-stream", daemon=True)
    worker.start()
    try:
        while (item := box.get()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        while worker.is_alive():
            for name in names:
                engine.abort(name)
            worker.join(0.05)
