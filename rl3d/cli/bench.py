"""``rl3d bench``: the measurements behind the documents, one word each."""

import argparse
from importlib import import_module
from typing import Any

from rl3d.bench import BENCHES
from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    sub = command(commands, "bench", run, "Measure what the documents claim.")
    sub.set_defaults(bench=None, parser=sub)
    names = sub.add_subparsers(metavar="NAME", title="benches")
    for name in BENCHES:
        module = import_module(f"rl3d.bench.{name}")
        bench = names.add_parser(name, help=module.HELP, description=module.HELP)
        bench.set_defaults(bench=module)
        module.arguments(bench)


def run(args: argparse.Namespace) -> int:
    if args.bench is None:
        args.parser.print_help()
        return 2
    return args.bench.run(args)
