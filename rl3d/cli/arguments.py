"""Arguments that several commands share."""

import argparse
from collections.abc import Callable
from typing import Any


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> Any:
    """The parser of one command; ``text`` is its line in ``rl3d --help``, ``more`` follows in its own help."""
    sub = commands.add_parser(name, help=text, description=f"{text} {more}".strip())
    sub.set_defaults(command=name, run=run)
    return sub


def config_file(sub: Any) -> None:
    """CONFIG and key=value ..., as every command takes them that reads a configuration file."""
    sub.add_argument("config", metavar="CONFIG", help="YAML file, or the name of one that comes with rl3d: quickstart")
    sub.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key, for example algorithm.lr=1e-6 trainer.steps=10"
    )


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def model(sub: Any) -> None:
    """MODEL, as every command takes it that plans from sizes alone."""
    text = "Hugging Face directory, config.json, hub id, or a shipped shape such as llama2-7b (configs/models/)"
    sub.add_argument("model", metavar="MODEL", help=text)


def links(sub: Any) -> None:
    """--topology and --gpus-per-node."""
    text = "file (YAML or JSON) or preset: h100-8 (what is assumed), h200-8, a100-8, a100-40g-8, pcie-8"
    sub.add_argument("--topology", metavar="FILE", default="h100-8", help=text)
    sub.add_argument("--gpus-per-node", metavar="N", type=positive, help="other than the topology's")
