"""What the documents claim, as commands that anyone can run again: ``rl3d bench NAME``.

Each module has ``HELP``, one line; ``arguments(parser)``, which declares its options; and ``run(args)``, which measures,
prints, and returns the exit code.
"""

BENCHES = ("plan", "links", "step", "generate", "agreement", "switch", "first_batch", "convert")
"""Modules of this package, one for each bench."""


class BenchError(RuntimeError):
    """A bench that cannot run here; the message says what it needs."""


def positive_numbers(text: str, option: str) -> list[int]:
    """The numbers of an option that takes several, each 1 or more; BenchError names ``option`` otherwise."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise BenchError(f"{option} {text}; expected numbers of 1 or more between commas")
    return numbers
