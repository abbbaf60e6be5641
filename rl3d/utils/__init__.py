"""What users import by name: the environment report."""

from rl3d.utils.check_env import check_env

__all__ = ["check_env"]
