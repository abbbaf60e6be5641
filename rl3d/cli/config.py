"""``rl3d config``: what each configuration key means."""

import argparse
import sys
from typing import Any

from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    sub = command(commands, "config", run, "Explain the configuration keys, or one of them.")
    sub.add_argument("key", metavar="KEY", nargs="?", help="for example layout or algorithm.lr")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rl3d.config import explain

    found = explain(args.key)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if args.key and len(found) == 1:
        info = found[0]
        console.print(Text(info.key, style="bold"))
        for name, text in (("meaning", info.meaning), ("value", info.kind), ("default", info.default)):
            console.print(Text(f"  {name:<8} {text}"))
        return 0
    table = Table("key", "default", "meaning", box=None, pad_edge=False)
    for info in found:
        style = "bold" if info.section else ""
        table.add_row(Text(info.key, style=style), Text(info.default), Text(info.meaning))
    console.print(table)
    return 0
