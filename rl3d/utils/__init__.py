"""What users import by name: the environment report and the profile of switches."""

from rl3d.utils.check_env import check_env
from rl3d.utils.profiling import enable_switch_profiling, print_switch_report, save_switch_trace, switch_report

__all__ = ["check_env", "enable_switch_profiling", "print_switch_report", "save_switch_trace", "switch_report"]
