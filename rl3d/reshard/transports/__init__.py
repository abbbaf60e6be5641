"""Ways to carry the buckets of a program from rank to rank."""

from rl3d.reshard.transports.base import Transport
from rl3d.reshard.transports.collective import CollectiveTransport
from rl3d.reshard.transports.inprocess import run_inprocess

__all__ = ["CollectiveTransport", "Transport", "run_inprocess"]
