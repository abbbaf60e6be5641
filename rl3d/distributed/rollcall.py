"""Which ranks still answer: asked when communication with them broke off, so that an error can name who has gone."""

import threading
import time
from typing import Any

POLL_S = 0.5
WAIT_S = 6.0
"""Several polls: a process that is alive answers however busy its main thread is."""


class LostRankError(RuntimeError):
    """A collective broke off or ran out of time: some rank has died, or does not come."""


class RollCall:
    """A thread on every rank that answers, through the job's store, as long as the process lives.

    The main thread may be inside a collective that waits for the rank that is sought.

    Args:
        store: c10d store shared by the ranks; two connections of our own are made from it.
        rank, world_size: of this process.
        name: prefix of the keys, the same on all ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        self._asker, self._closed = store.clone(), threading.Event()
        self._thread = threading.Thread(target=self._answer, args=(store.clone(),), name=f"rl3d-{name}-roll", daemon=True)
        self._thread.start()

    def absent(self, within_s: float = WAIT_S) -> list[int]:
        """Ranks that did not answer in time. Local: any rank may ask, at any time.

        Raises:
            LostRankError: the store has gone, and with it the process that keeps it.
        """
        try:
            number = self._asker.add(f"{self.name}/roll", 1)
            end = time.monotonic() + within_s
            missing = set(range(self.world_size)) - {self.rank}
            while missing and time.monotonic() < end:
                missing = {rank for rank in missing if self._last(rank) < number}
                if missing:
                    time.sleep(0.05)
        except RuntimeError as error:
            raise LostRankError(
                "the job's store has gone, with the process that keeps it (rank 0, or the launcher)"
            ) from error
        return sorted(missing)

    def _last(self, rank: int) -> int:
        key = f"{self.name}/here/{rank}"
        return int(self._asker.get(key)) if self._asker.check([key]) else 0

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _answer(self, store: Any) -> None:
        answered = 0
        try:
            while not self._closed.wait(POLL_S):
                key = f"{self.name}/roll"
                asked = int(store.get(key)) if store.check([key]) else 0
                if asked > answered:
                    store.set(f"{self.name}/here/{self.rank}", str(asked))
                    answered = asked
        except RuntimeError:  # the store has gone; whoever asks will hear of it
            return
