"""Ways to carry the buckets of a program from rank to rank."""

from rl3d.reshard.transports.base import Transport
from rl3d.reshard.transports.collective import CollectiveTransport
from rl3d.reshard.transports.inprocess import run_inprocess
from rl3d.reshard.transports.peer import PeerTransport

__all__ = ["CollectiveTransport", "PeerTransport", "Transport", "run_inprocess"]
