"""What users import by name: the environment report and the profile of switches."""

from rl3d.utils.check_env import check_env
from rl3d.utils.profiling import enable_switch_profiling, print_switch_report, switch_report

__all__ = ["check_env", "enable_switch_profiling", "print_switch_report", "switch_report"]
