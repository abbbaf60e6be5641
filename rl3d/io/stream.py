"""Streaming writer of checkpoint directories: a group of tensors at a time, resumable, complete or not there at all.

Everything goes into a hidden directory beside the final one, which takes the final name at the end. Groups are read, turned
and written in any order, several at a time (:mod:`rl3d.io.extents`). A killed run is taken up from the groups whose bytes
are right, and ends in the bytes that an undisturbed one would have written.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock
from typing import Any

from rl3d.io.extents import JOURNAL_FILE, Files, Group, Record
from rl3d.io.hf_reader import CheckpointError

PLAN_FILE = ".plan.json"


class ConvertError(ValueError):
    """A conversion that cannot be done as asked; the message says what is in the way."""


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


def file_sizes(groups: Sequence[Group], headers: Mapping[str, bytes]) -> dict[str, int]:
    """Bytes of every file, in order of appearance. ``headers``: what a file begins with."""
    sizes = {name: len(header) for name, header in headers.items()}
    for group in groups:
        for extent in group.extents:
            sizes[extent.file] = sizes.get(extent.file, 0) + extent.length
    return sizes


def partial_directory(final: Path) -> Path:
    """Where a conversion lies until it is complete."""
    return final.with_name(f".{final.name}.partial")


def write_directory(final: Path, identity: dict[str, Any], groups: Sequence[Group], headers: Mapping[str, bytes],
                    finish: Callable[[Path, list[Record]], None], *, jobs: int = 1, resume: bool = False,
                    overwrite: bool = False, show: Callable[[int, int, float], None] | None = None,
                    ) -> list[Record]:  # fmt: skip
    """Write ``groups`` into a directory that gets its name ``final`` when everything is on disk.

    Args:
        identity: what the result depends on (JSON); a partial conversion of another identity is not resumed.
        headers: file name -> what it begins with, for files that begin with anything.
        finish: writes what is known only at the end (metadata, sidecars) into the directory it is given.
        jobs: groups in memory at the same time, each in a thread that reads, turns and writes it.
        resume: take up what a killed conversion left. Without it that is thrown away.
        overwrite: replace a ``final`` that exists, once the new one is complete.

    Raises:
        ConvertError: ``final`` exists or is being written, too little space, nothing to resume from, or the disk failed
            (what is there can be resumed then).
        CheckpointError: from a group's ``make``; nothing is left behind then.
    """
    if final.exists() and not overwrite:
        raise ConvertError(f"{final} exists; choose another name or say --overwrite")
    partial = partial_directory(final)
    sizes = file_sizes(groups, headers)
    _require_space(partial, sum(sizes.values()), resume)
    _require_nobody(partial)
    _prepare(partial, identity, resume)
    progress = Progress(sum(sizes.values()), show)
    with _held(partial):
        try:
            records = _write_groups(partial, groups, headers, sizes, progress, jobs)
            finish(partial, records)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            raise ConvertError(f"{partial}: {error}; --resume goes on from here once that is mended") from error
    for leftover in (JOURNAL_FILE, PLAN_FILE):
        (partial / leftover).unlink()
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


def _require_space(partial: Path, total: int, resume: bool) -> None:
    """Before anything is made: what a killed run left counts, whether it is kept or thrown away first."""
    left = [p.stat() for p in partial.iterdir() if p.is_file()] if partial.exists() else []
    there = min(total, sum(s.st_blocks * 512 for s in left))  # files are sparse until they are complete
    parent = next(p for p in (partial.parent, *partial.parent.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if total - there > free:
        raise ConvertError(
            f"{partial.parent}: {total - there:,} bytes to write, {free:,} free; make room or choose another place"
        )


@contextlib.contextmanager
def _held(partial: Path) -> Iterator[None]:
    """Marks the directory as in use by this process, until it ends in whatever way."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _require_nobody(partial: Path) -> None:
    if not partial.exists():
        return
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConvertError(f"{partial} is being written by another process; wait for it, or choose another name") from None
    except OSError:
        return
    finally:
        os.close(handle)


def _write_groups(partial: Path, groups: Sequence[Group], headers: Mapping[str, bytes], sizes: Mapping[str, int],
                  progress: Progress, jobs: int) -> list[Record]:  # fmt: skip
    files = Files(partial, groups, headers, sizes)
    complete = False
    try:
        records = files.kept()
        files.start_journal(list(records.values()))
        progress.add(sum(map(len, headers.values())) + sum(w.length for r in records.values() for w in r.written))
        for record in _run([g for g in groups if g.name not in records], files.write, progress, jobs):
            records[record.name] = record
        complete = True
    finally:
        files.close(sync=complete)
    return [records[g.name] for g in groups]


def _run(groups: Sequence[Group], write: Callable[[Group], Record], progress: Progress, jobs: int) -> Iterator[Record]:
    def one(group: Group) -> Record | None:
        if progress.stop.is_set():
            return None
        record = write(group)
        progress.add(sum(w.length for w in record.written))
        return record

    if jobs == 1:
        yield from (record for group in groups if (record := one(group)) is not None)
        return
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(one, group) for group in groups]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            progress.stop.set()
    for future in futures:
        if (record := future.result()) is not None:
            yield record


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
