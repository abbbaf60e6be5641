"""What schedulers work on: streams of bytes between ranks, and the portions of them that travel in each bucket."""

from typing import NamedTuple

from rl3d.reshard.boxes import Ints

ALIGN = 16
"""Messages start at multiples of this many bytes in staging memory; staging is budgeted as if every stream did."""


AT_ONCE = 2
"""Buckets that have staging memory at a time: one is packed, or unpacked, while the other is on its way."""


def bucket_bytes(staging_bytes: int) -> int:
    """How large a plan's buckets may be for messages to need so many bytes of staging memory a direction, at most."""
    return staging_bytes // AT_ONCE


def places(buckets: int, relays: bool) -> int:
    """Buckets that have staging memory at a time, of a program with so many (:mod:`rl3d.reshard.transports.collective`)."""
    return 1 if relays else min(AT_ONCE, max(buckets, 1))


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
