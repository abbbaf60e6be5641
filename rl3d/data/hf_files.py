"""Model files that transformers wrote, readable by whoever may read their configuration."""

from pathlib import Path


def share_weights(directory: Path) -> None:
    """Give weight files, which safetensors creates for their owner only, the permissions of config.json."""
    mode = (directory / "config.json").stat().st_mode & 0o777
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)
