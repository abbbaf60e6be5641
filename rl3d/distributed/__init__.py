"""Start-up of ranks (deepspeed, torchrun, srun, plain python), their platform, process groups, control and failures.

Import the submodules directly; importing this package loads nothing heavy.
"""
