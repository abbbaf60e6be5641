"""``rl3d files``: the configurations, examples and scripts that come with rl3d."""

import argparse
from pathlib import Path
from typing import Any

from rl3d.cli.arguments import command


def add(commands: Any) -> None:
    sub = command(
        commands,
        "files",
        run,
        "Copy the configurations, examples, launch and batch scripts that come with rl3d.",
        "Without DIR it says where they are. Nothing that is there already is overwritten.",
    )
    sub.add_argument("directory", metavar="DIR", nargs="?", help="where to; for example . or my-project")


def run(args: argparse.Namespace) -> int:
    from rl3d.config import shipped

    if args.directory is None:
        for name in shipped.FOLDERS:
            print(shipped.folder(name))
        return 0
    for path in shipped.copy_to(Path(args.directory).expanduser()):
        print(path)
    return 0
