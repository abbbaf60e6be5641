"""Training engine, hybrid engine with its two modes, and the actor.

Importing this package prepares the process for megatron-core and DeepSpeed (environment, CPU shim, quiet logs): both
read their surroundings when they are imported.
"""

from rl3d.distributed.platform import prepare

prepare()
