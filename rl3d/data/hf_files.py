"""Writing models with transformers: quietly, and readable by whoever may read their configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors still show; progress bars and notices of transformers are silent inside the block, then as before."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def share_weights(directory: Path) -> None:
    """Give weight files, which safetensors creates for their owner only, the permissions of config.json."""
    mode = (directory / "config.json").stat().st_mode & 0o777
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)
