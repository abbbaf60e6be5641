"""``rl3d check-env``: what is installed."""

import argparse
from typing import Any

from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    command(commands, "check-env", run, "Say what is installed and what is off. Exit 1 when a required part is missing.")


def run(args: argparse.Namespace) -> int:
    from rl3d.utils import check_env

    found = check_env()
    return 0 if all(part["ok"] for part in found.values() if part["required"]) else 1
