"""What schedulers work on: streams of bytes between ranks, and the portions of them that travel in each bucket."""

from typing import NamedTuple

from rl3d.reshard.boxes import Ints

ALIGN = 16
"""Messages start at multiples of this many bytes in staging memory; staging is budgeted as if every stream did."""


class Streams(NamedTuple):
    """Columns: ``size`` bytes from ``src`` to ``dst``.

    ``slack`` is by how many bytes a message may come out longer than asked for. A stream with a ``parent`` (-1: none)
    hands on the very bytes of that stream, once they are there. ``turn`` orders equally urgent streams.
    """

    src: Ints
    dst: Ints
    size: Ints
    slack: Ints
    parent: Ints
    turn: Ints


class Portions(NamedTuple):
    """Columns: ``size`` more bytes of a stream travel in ``bucket``; rising by stream, then bucket."""

    stream: Ints
    bucket: Ints
    size: Ints
