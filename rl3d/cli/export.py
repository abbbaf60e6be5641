"""``rl3d export``: the weights of a run as a Hugging Face directory."""

import argparse
from pathlib import Path
from typing import Any

from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    sub = command(commands, "export", run, "Write a run or a checkpoint as a Hugging Face model directory.")
    sub.add_argument("source", metavar="RUN|CHECKPOINT", help="a run (runs/NAME) or one of its checkpoints")
    sub.add_argument("directory", metavar="DIR", help="where to")


def run(args: argparse.Namespace) -> int:
    from rl3d.config import ConfigError

    if not Path(args.source).is_dir():
        raise ConfigError(f"{args.source}: no such run or checkpoint directory; expected runs/NAME or a checkpoint in it")
    from rl3d.trainer.run import export

    export(args.source, args.directory)
    return 0
