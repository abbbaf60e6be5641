"""What pyproject.toml cannot say: files that lie beside the package in a checkout go into rl3d/share/ of a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHARED = ("configs", "examples", "launch", "slurm")


class BuildWithShared(build_py):
    """Builds the package, then copies the shared folders in; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in SHARED:
                target = Path(self.build_lib) / "rl3d" / "share" / folder
                shutil.rmtree(target, ignore_errors=True)  # an old build directory may hold files that are gone
                shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))


setup(cmdclass={"build_py": BuildWithShared})
