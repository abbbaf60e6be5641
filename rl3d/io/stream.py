"""Streaming writer of checkpoint directories: a group of tensors at a time, resumable, complete or not there at all.

Everything goes into a hidden directory beside the final one, which takes the final name at the end. Each file has a
journal: a line for each group written, with its SHA-256. A killed run is taken up after the last group whose bytes are
right, and ends in the bytes that an undisturbed one would have written.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO

from rl3d.io.hf_reader import CheckpointError

PLAN_FILE = ".plan.json"
_BLOCK = 16 << 20


class ConvertError(ValueError):
    """A conversion that cannot be done as asked; the message says what is in the way."""


@dataclass(frozen=True)
class Group:
    """What is read, turned and written at once.

    Attributes:
        name: canonical name of the parameter.
        size: bytes that it takes in memory (what bounds the conversion's memory), a little less than on disk.
        make: reads it and returns the blocks to write, and facts (JSON) that the finished manifest keeps.
    """

    name: str
    size: int
    make: Callable[[], tuple[Iterable[Any], dict[str, Any]]]


@dataclass(frozen=True)
class OutputFile:
    """A file of groups in this order, after ``header``."""

    name: str
    groups: Sequence[Group]
    header: bytes = b""

    @property
    def size(self) -> int:
        return len(self.header) + sum(g.size for g in self.groups)


@dataclass(frozen=True)
class Record:
    """A group that is on disk: ``length`` bytes of ``file`` from ``offset``, their SHA-256, and facts about it."""

    name: str
    file: str
    offset: int
    length: int
    sha256: str
    facts: dict[str, Any] = field(default_factory=dict)


class Progress:
    """Bytes written so far, and whether to stop; shared by the threads. ``show(done, total, seconds)`` is called often."""

    def __init__(self, total: int, show: Callable[[int, int, float], None] | None):
        self._done, self._total, self._show = 0, total, show
        self._lock, self._start = Lock(), time.monotonic()
        self.stop = Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._show:
                self._show(self._done, self._total, time.monotonic() - self._start)


def partial_directory(final: Path) -> Path:
    """Where a conversion lies until it is complete."""
    return final.with_name(f".{final.name}.partial")


def write_directory(final: Path, identity: dict[str, Any], files: Sequence[OutputFile],
                    finish: Callable[[Path, list[Record]], None], *, jobs: int = 1, resume: bool = False,
                    overwrite: bool = False, show: Callable[[int, int, float], None] | None = None,
                    ) -> list[Record]:  # fmt: skip
    """Write ``files`` into a directory that gets its name ``final`` when everything is on disk.

    Args:
        identity: what the result depends on (JSON); a partial conversion of another identity is not resumed.
        finish: writes what is known only at the end (metadata, sidecars) into the directory it is given.
        jobs: files written at the same time, each with one group in memory.
        resume: take up what a killed conversion left. Without it that is thrown away.
        overwrite: replace a ``final`` that exists, once the new one is complete.

    Raises:
        ConvertError: ``final`` exists, too little space, or nothing to resume from.
        CheckpointError: from a group's ``make``; nothing is left behind then.
    """
    if final.exists() and not overwrite:
        raise ConvertError(f"{final} exists; choose another name or say --overwrite")
    partial = partial_directory(final)
    _prepare(partial, identity, resume)
    total = sum(f.size for f in files)
    _require_space(partial, total)
    progress = Progress(total, show)
    try:
        records = _write_files(partial, files, progress, jobs)
        finish(partial, records)
    except CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for leftover in [*partial.glob(".*.journal"), partial / PLAN_FILE]:
        leftover.unlink(missing_ok=True)
    _sync(partial)
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(partial, final)
        shutil.rmtree(old)
    else:
        os.replace(partial, final)
    _sync(final.parent)
    return records


def _write_files(partial: Path, files: Sequence[OutputFile], progress: Progress, jobs: int) -> list[Record]:
    if jobs == 1:
        return [record for f in files for record in _write_file(partial, f, progress)]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(_write_file, partial, f, progress) for f in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            progress.stop.set()
    # the error of a file comes before those of files that were told to stop because of it
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, InterruptedError)):
        raise error
    return [record for f in futures for record in f.result()]


def _prepare(partial: Path, identity: dict[str, Any], resume: bool) -> None:
    text = json.dumps(identity, indent=1, sort_keys=True)
    plan = partial / PLAN_FILE
    if resume and partial.exists():
        if not plan.is_file() or plan.read_text() != text:
            raise ConvertError(
                f"{partial} belongs to another conversion (source, options or versions differ); run without --resume to "
                f"start anew"
            )
        return
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    plan.write_text(text)


def _require_space(partial: Path, total: int) -> None:
    there = sum(p.stat().st_size for p in partial.iterdir() if p.is_file())
    free = shutil.disk_usage(partial).free
    if total - there > free:
        raise ConvertError(
            f"{partial.parent}: {total - there:,} bytes to write, {free:,} free; make room or choose another place"
        )


def _write_file(partial: Path, output: OutputFile, progress: Progress) -> list[Record]:
    path, journal = partial / output.name, partial / f".{output.name}.journal"
    records = _kept(path, journal, output)
    end = records[-1].offset + records[-1].length if records else len(output.header)
    with path.open("r+b" if path.exists() else "w+b") as file, journal.open("w") as log:
        file.seek(0)
        file.write(output.header)
        file.truncate(end)
        file.seek(end)
        for record in records:
            _append(log, record)
        progress.add(end)
        for group in output.groups[len(records) :]:
            if progress.stop.is_set():
                raise InterruptedError(f"{output.name}: another file failed")
            blocks, facts = group.make()
            digest, start = sha256(), file.tell()
            for block in blocks:
                file.write(block)
                digest.update(block)
            del block, blocks
            file.flush()
            record = Record(group.name, output.name, start, file.tell() - start, digest.hexdigest(), facts)
            _append(log, record)
            records.append(record)
            progress.add(record.length)
        os.fsync(file.fileno())
    return records


def _append(log: Any, record: Record) -> None:
    log.write(json.dumps(asdict(record)) + "\n")
    log.flush()


def _kept(path: Path, journal: Path, output: OutputFile) -> list[Record]:
    """Groups that an earlier run wrote whole, from the first on, their bytes read again."""
    if not (path.is_file() and journal.is_file()):
        return []
    kept: list[Record] = []
    with path.open("rb") as file:
        for line, group in zip(journal.read_text().splitlines(), output.groups):
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError):
                break  # the line that was being written
            if record.name != group.name or hash_range(file, record.offset, record.length) != record.sha256:
                break
            kept.append(record)
    return kept


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


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
