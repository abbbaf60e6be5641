"""The converter on checkpoints that are too large to be convenient: memory, real kills, and taking up what they left."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from rl3d.bench.convert import LARGEST, make_checkpoint, once
from rl3d.io.convert import hf_to_megatron
from rl3d.io.extents import JOURNAL_FILE
from rl3d.io.stream import ConvertError, partial_directory
from tests.models.zoo import save
from tests.ranks import ROOT

ALLOWED = 2 * LARGEST + 128e6


def hashes(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): sha256(p.read_bytes()).hexdigest() for p in directory.rglob("*") if p.is_file()
    }  # fmt: skip


def start(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "rl3d", "convert", *words], env=env, stdout=pipe, stderr=pipe, text=True)


def journaled(target: Path) -> int:
    journal = partial_directory(target) / JOURNAL_FILE
    return journal.read_text().count("\n") if journal.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("work", ["import", "export"])
def test_a_conversion_killed_three_times_ends_in_the_same_bytes(tmp_path: Path, work: str) -> None:
    source = tmp_path / "hf"
    make_checkpoint(source, 0.35)
    hf_to_megatron(source, tmp_path / "m", max_shard_size=200_000_000)
    if work == "import":
        given, right = source, tmp_path / "m"
    else:
        given, right = tmp_path / "m", tmp_path / "right"
        whole = start("export", str(given), str(right), "--max-shard-size", "200MB")
        assert whole.wait(timeout=300) == 0
    target, kept = tmp_path / "killed", []
    for groups in (1, 3, 5):  # of 9: embedding, 6 of the layer, final norm, head
        words = [work, str(given), str(target), "--max-shard-size", "200MB", "--jobs", "2", *(["--resume"] if kept else [])]
        child = start(*words)
        while journaled(target) < groups and child.poll() is None:
            time.sleep(0.0005)
        assert child.poll() is None, f"it ended before it could be killed: {child.communicate()}"
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
        child.communicate()
        assert not target.exists(), "nothing has the final name before it is complete"
        kept.append(journaled(target))
    assert kept == sorted(kept) and kept[0] >= 1
    done = start(*words[:7], "--resume")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert hashes(target) == hashes(right)
    assert not partial_directory(target).exists()


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_parameter(tmp_path: Path) -> None:
    size = make_checkpoint(tmp_path / "hf", 2.0)
    assert 1.9e9 < size < 2.1e9
    into = once("import", tmp_path / "hf", tmp_path / "m")
    out = once("export", tmp_path / "m", tmp_path / "back")
    cut = once("reshard", tmp_path / "m", tmp_path / "cut", "tp=2", "pp=2")
    peaks = {"import": into["peak_bytes"], "export": out["peak_bytes"], "reshard": cut["peak_bytes"]}
    assert all(0 < peak <= ALLOWED for peak in peaks.values()), (peaks, ALLOWED)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path, "mistral")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(ConvertError, match=r"[\d,]+ bytes to write, 100,000 free"):
        hf_to_megatron(source, tmp_path / "made" / "m")
    assert not (tmp_path / "made").exists()


def test_a_disk_that_fails_leaves_something_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = save(tmp_path, "mistral"), tmp_path / "m"
    hf_to_megatron(source, tmp_path / "right")
    write, left = os.pwrite, [200_000]

    def full(handle: int, data: bytes, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConvertError, match="No space left on device; --resume goes on"):
        hf_to_megatron(source, target)
    assert not target.exists() and journaled(target) >= 1
    monkeypatch.setattr(os, "pwrite", write)
    hf_to_megatron(source, target, resume=True)
    assert hashes(target) == hashes(tmp_path / "right")


def test_two_conversions_do_not_write_one_directory(tmp_path: Path) -> None:
    source, target = save(tmp_path, "mistral"), tmp_path / "m"
    refused: list[str] = []

    def second(*_: float) -> None:
        if not refused:
            with pytest.raises(ConvertError, match="is being written by another process") as error:
                hf_to_megatron(source, target, resume=True)
            refused.append(str(error.value))

    hf_to_megatron(source, target, show=second)
    assert refused and target.exists()
