"""A scheduler's notice that time is nearly up (SIGUSR1), remembered until a run listens for it. Imports nothing heavy."""

import signal
import threading

early = threading.Event()
"""The notice came before a run listened."""


def remember() -> None:
    """Call it before importing the libraries: a job shorter than its notice is told while it starts, and would die."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, frame: early.set())
