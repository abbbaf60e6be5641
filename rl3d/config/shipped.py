"""Files that come with rl3d beside its code: configurations, examples, launch and batch scripts."""

import filecmp
import shutil
from pathlib import Path

from rl3d.config.base import ConfigError

FOLDERS = ("configs", "examples", "launch", "slurm")
_PACKAGE = Path(__file__).parents[1]


def folder(name: str) -> Path:
    """Where a folder of :data:`FOLDERS` lies: in the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "share" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def find_config(path: Path) -> Path | None:
    """The shipped configuration that ``quickstart``, ``quickstart.yaml`` or ``configs/quickstart.yaml`` names, if any."""
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    if len(parts) != 1 or path.is_absolute():
        return None
    found = folder("configs") / parts[0]
    found = found if found.suffix == ".yaml" else found.with_name(found.name + ".yaml")
    return found if found.is_file() else None


def config_names() -> list[str]:
    """Names that :func:`find_config` knows."""
    return sorted(file.stem for file in folder("configs").glob("*.yaml"))


def copy_to(directory: Path) -> list[Path]:
    """Copy all folders into ``directory``; files that are there already and equal stay. Returns what was written.

    Raises :class:`ConfigError`, before anything is written, when a file there differs.
    """
    pairs = [
        (file, directory / name / file.relative_to(folder(name)))
        for name in FOLDERS
        for file in sorted(folder(name).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    ]
    differing = [
        str(to) for file, to in pairs if to.exists() and not (to.is_file() and filecmp.cmp(file, to, shallow=False))
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(f"{', '.join(differing[:3])}{more}: there already, and not as shipped; give another directory")
    written = []
    for file, to in pairs:
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)
            if file.read_bytes()[:2] == b"#!":
                to.chmod(to.stat().st_mode | 0o111)  # some installers drop the executable bit
            written.append(to)
    return written
