"""The files of a checkpoint directory while they are written: every group of bytes at its place, hashed and noted.

Where each byte will lie is known before the first one is written, so groups are written in any order, several at a time. The
journal has a line for each group on disk, with the SHA-256 of its bytes.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

JOURNAL_FILE = ".journal"
_BLOCK = 256 << 10
"""Bytes hashed and written at a time: a block is still in the core's cache when it is written. Linux puts a block of many
megabytes into pages as large, and finding such pages took it three times as long as writing the bytes (ext4, Linux 6.18)."""

Write = Callable[[Any], Any]
"""Takes the next block of bytes (anything with the buffer protocol)."""


class Extent(NamedTuple):
    """``length`` bytes of a file; extents of one file follow each other in the order of the groups."""

    file: str
    length: int


@dataclass(frozen=True)
class Group:
    """What is read, turned and written at once; the largest one bounds the conversion's memory.

    Attributes:
        name: canonical name of the parameter.
        extents: where it goes.
        make: reads it; returns one function for each extent, which writes that extent's bytes, and facts (JSON) that the
            finished manifest keeps.
    """

    name: str
    extents: tuple[Extent, ...]
    make: Callable[[], tuple[Sequence[Callable[[Write], Any]], dict[str, Any]]]


class Written(NamedTuple):
    """An extent on disk: ``length`` bytes of ``file`` from ``offset``, and their SHA-256."""

    file: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """A group that is on disk, and facts about it."""

    name: str
    written: tuple[Written, ...]
    facts: dict[str, Any] = field(default_factory=dict)


class Files:
    """The files of a directory, open, at their final sizes; and the journal beside them."""

    def __init__(self, partial: Path, groups: Sequence[Group], headers: Mapping[str, bytes], sizes: Mapping[str, int]):
        self._partial = partial
        self._lock = Lock()
        self.handles: dict[str, BinaryIO] = {}
        self.places: dict[str, list[Written]] = {}  # group -> extents, not hashed yet
        end = {name: len(headers.get(name, b"")) for name in sizes}
        for group in groups:
            self.places[group.name] = []
            for file, length in group.extents:
                self.places[group.name].append(Written(file, end[file], length, ""))
                end[file] += length
        for name, size in sizes.items():
            path = partial / name
            self.handles[name] = handle = path.open("r+b" if path.exists() else "w+b")
            handle.truncate(size)
            os.pwrite(handle.fileno(), headers.get(name, b""), 0)

    def kept(self) -> dict[str, Record]:
        """Groups that an earlier run wrote whole: journal and bytes agree."""
        journal = self._partial / JOURNAL_FILE
        out: dict[str, Record] = {}
        for line in journal.read_text().splitlines() if journal.is_file() else ():
            try:
                entry = json.loads(line)
                written = tuple(Written(*extent) for extent in entry["written"])
            except (ValueError, TypeError, KeyError):
                continue  # the line that was being written
            right = [w._replace(sha256="") for w in written] == self.places.get(entry["name"])
            if right and all(hash_range(self.handles[w.file], w.offset, w.length) == w.sha256 for w in written):
                out[entry["name"]] = Record(entry["name"], written, entry["facts"])
        return out

    def start_journal(self, records: Sequence[Record]) -> None:
        self._journal = (self._partial / JOURNAL_FILE).open("w")
        for record in records:
            self.note(record)

    def note(self, record: Record) -> None:
        with self._lock:
            self._journal.write(json.dumps(asdict(record)) + "\n")
            self._journal.flush()

    def write(self, group: Group) -> Record:
        """Raises ValueError when ``make`` gives other extents than the group announced."""
        emits, facts = group.make()
        written = []
        for emit, place in zip(emits, self.places[group.name], strict=True):
            sink = _Sink(self.handles[place.file], place)
            emit(sink.write)
            written.append(sink.close())
        record = Record(group.name, tuple(written), facts)
        self.note(record)
        return record

    def close(self, sync: bool) -> None:
        for handle in self.handles.values():
            if sync:
                os.fsync(handle.fileno())
            handle.close()
        with contextlib.suppress(AttributeError):
            self._journal.close()


class _Sink:
    """Writes the blocks of one extent at its place, and hashes them."""

    def __init__(self, handle: BinaryIO, place: Written):
        self._handle, self._place, self._at, self._digest = handle, place, place.offset, sha256()

    def write(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        end = self._place.offset + self._place.length
        if self._at + len(view) > end:
            raise ValueError(f"{self._place.file}: more than the {self._place.length} bytes announced")
        for start in range(0, len(view), _BLOCK):
            part = view[start : start + _BLOCK]
            self._digest.update(part)
            while part:
                count = os.pwrite(self._handle.fileno(), part, self._at)
                self._at, part = self._at + count, part[count:]
        return len(view)

    def flush(self) -> None:
        """For writers that expect a file."""

    def close(self) -> Written:
        short = self._place.offset + self._place.length - self._at
        if short:
            raise ValueError(f"{self._place.file}: {short} of the {self._place.length} bytes announced are missing")
        return self._place._replace(sha256=self._digest.hexdigest())


def hash_range(file: BinaryIO, offset: int, length: int) -> str | None:
    """SHA-256 of a part of a file; ``None`` when the file ends before it."""
    digest = sha256()
    file.seek(offset)
    while length > 0:
        block = file.read(min(length, _BLOCK))
        if not block:
            return None
        digest.update(block)
        length -= len(block)
    return digest.hexdigest()
