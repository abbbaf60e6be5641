"""The local launcher: output, failures, signals, and that nothing is left behind."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl3d.distributed import launcher
from rl3d.distributed.launcher import launch_local, run_local

FAKE = str(Path(__file__).with_name("fake_rank.py"))
ROOT = Path(__file__).resolve().parents[2]


def _gone(pids: list[int], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _pids(directory: Path, count: int) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        texts = [path.read_text() for path in directory.glob("pid*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"{count} ranks did not start")


def _start_launcher(mode: str, directory: Path) -> subprocess.Popen[str]:
    code = (
        "import sys; from rl3d.distributed.launcher import launch_local; "
        f"sys.exit(launch_local([{FAKE!r}, {mode!r}, {str(directory)!r}], 2))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_rank_zero_to_the_terminal_and_every_rank_to_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_local([FAKE, "ok"], 3, log_dir=tmp_path / "logs") == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 0 of 3 on port ") and out.count("\n") == 1
    for rank in range(3):
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text().startswith(f"rank {rank} of 3")


def test_threads_are_shared_out_unless_the_user_has_said(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    for given, expected in (
        (env, str(max(1, len(os.sched_getaffinity(0)) // 2))),
        ({**env, "OMP_NUM_THREADS": "7"}, "7"),
    ):
        out = io.StringIO()
        assert run_local([FAKE, "env"], 2, env=given, echo=out).code == 0
        assert out.getvalue().split() == ["0", "127.0.0.1", expected]


def test_a_failing_rank_ends_all_and_its_traceback_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    code = launch_local([FAKE, "raise", str(tmp_path)], 3, log_dir=tmp_path)
    assert code == 1
    assert time.monotonic() - begin < 60
    shown = capsys.readouterr()
    assert shown.err.count("Traceback (most recent call last)") == 1
    assert shown.err.count("ValueError: deliberate") == 1
    assert "rank 1 failed" in shown.err and "Traceback" not in shown.out
    assert _gone(_pids(tmp_path, 3))


def test_a_rank_that_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 1.0)
    begin = time.monotonic()
    result = run_local([FAKE, "stubborn", str(tmp_path)], 2)
    assert (result.code, result.failed_rank) == (3, 1)
    assert time.monotonic() - begin < 60
    assert _gone(_pids(tmp_path, 2))


def test_ranks_that_were_asked_to_stop_did_not_fail(tmp_path: Path) -> None:
    result = run_local([FAKE, "stopped", str(tmp_path)], 3)
    assert (result.code, result.failed_rank, result.traceback) == (75, None, "") and "goes on" in result.reason


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    result = run_local([FAKE, "killed", str(tmp_path)], 2)
    assert result.code == 137 and result.failed_rank == 1
    assert "rank 1 was killed by SIGKILL" in result.reason


def test_time_out_names_the_ranks_that_still_run(tmp_path: Path) -> None:
    result = run_local([FAKE, "sleep", str(tmp_path)], 2, timeout_s=4)
    assert result.code == 124 and "still running: rank(s) 0, 1" in result.reason
    assert _gone(_pids(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    process = _start_launcher("sleep", tmp_path)
    pids = _pids(tmp_path, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err
    assert _gone(pids)


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    process = _start_launcher("sleep", tmp_path)
    pids = _pids(tmp_path, 2)
    assert all(_alive(pid) for pid in pids)
    process.kill()
    process.communicate(timeout=60)
    assert _gone(pids)


def test_the_launcher_loads_no_torch() -> None:
    code = "import sys, rl3d.distributed.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
