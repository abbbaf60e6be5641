"""One rank of a session: meets the others, then carries out calls until the session ends it."""

import importlib
import os
import pickle
from typing import Any

from rl3d.distributed.session import SETTINGS, Answer, answer_of, connect


def main() -> None:
    """Serve the session that started this process."""
    from rl3d.distributed import bootstrap, failures

    connection = connect(int(os.environ["RANK"]))
    device, _, timeout_s = os.environ[SETTINGS].partition(" ")
    runtime = bootstrap.init(timeout_s=float(timeout_s), device=device)
    with failures.guard(runtime):
        connection.send_bytes(pickle.dumps(Answer()))
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):  # the session has gone or has closed
                os._exit(0)
            answer = answer_of(lambda: _run(*pickle.loads(request)))  # noqa: B023
            try:
                data = pickle.dumps(answer)
            except Exception as error:
                data = pickle.dumps(Answer(error=TypeError(f"the result cannot be sent to the session: {error}")))
            connection.send_bytes(data)


def _run(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


if __name__ == "__main__":
    main()
