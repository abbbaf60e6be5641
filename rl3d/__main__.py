"""``python -m rl3d`` is the ``rl3d`` command."""

import sys

from rl3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
