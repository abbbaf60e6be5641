"""What a person sees while a run goes on: one line for each phase, and progress for what takes long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_EVERY_S = 10.0
"""Seconds between progress lines where there is no terminal to redraw."""


class Console:
    """Prints the lines of a run. ``enabled`` is true on rank 0 only, and only when trainer.loggers has console."""

    def __init__(self, enabled: bool = True, file: TextIO | None = None) -> None:
        self.enabled = enabled
        self._file = file

    @property
    def file(self) -> TextIO:
        """Where lines go: the file given, else the current standard output."""
        return sys.stdout if self._file is None else self._file

    def line(self, text: str) -> None:
        """Print one line as it is."""
        if self.enabled:
            print(text, file=self.file, flush=True)

    def sampling(self, step: int, prompts: int, responses: int) -> None:
        """``[Step 0] Sampling 32 prompts → 32 responses``"""
        self.line(f"[Step {step}] Sampling {prompts} prompts → {responses} responses")

    def rewarding(self, step: int, samples: int) -> None:
        """``[Step 0] Computing rewards for 32 samples...``"""
        self.line(f"[Step {step}] Computing rewards for {samples} samples...")

    def updating(self, step: int, mini_batches: int, role: str = "actor") -> None:
        """``[Step 0] Updating actor with 4 mini-batches...``"""
        self.line(f"[Step {step}] Updating {role} with {mini_batches} mini-batch{'es' * (mini_batches != 1)}...")

    def result(self, step: int, loss: float | None, reward_mean: float, kl: float | None,
               critic_loss: float | None = None) -> None:  # fmt: skip
        """``[Step 0] Actor loss: 1.824 | Reward mean: 1.002 | KL: 0.042``; what was not trained has no loss."""
        parts = {"Actor loss": loss, "Critic loss": critic_loss, "Reward mean": reward_mean, "KL": kl}
        self.line(f"[Step {step}] " + " | ".join(f"{name}: {x:.3f}" for name, x in parts.items() if x is not None))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress of ``total`` things while the block runs; call the value with how many more are done.

        A bar that goes away on a terminal; elsewhere a line every ten seconds, so that log files stay short.
        """
        if not self.enabled:
            yield lambda done: None
        elif self.file.isatty():
            yield from self._bar(what, total)
        else:
            yield from self._lines(what, total)

    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Terminal(file=self.file), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.advance(task, done)

    def _lines(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        done_so_far, started = 0, time.monotonic()
        said = started

        def advance(done: int) -> None:
            nonlocal done_so_far, said
            done_so_far += done
            now = time.monotonic()
            if now - said >= PLAIN_EVERY_S and done_so_far < total:
                said = now
                self.line(f"{what}: {done_so_far} of {total}, {now - started:.0f} s")

        yield advance
