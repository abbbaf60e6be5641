"""``python -m checkpoints_tools`` is ``rl3d convert``."""

import sys

from checkpoints_tools import main

if __name__ == "__main__":
    sys.exit(main())
