"""Command line of the checkpoint converter: HF -> Megatron, Megatron -> HF. The work is done by :mod:`rl3d.io`."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """``rl3d convert`` under its own name; returns the exit code."""
    from rl3d.cli import main as rl3d

    return rl3d(["convert", *(sys.argv[1:] if argv is None else argv)])
