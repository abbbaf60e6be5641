"""examples/notebook.ipynb in a real Jupyter kernel; an interrupted cell and a restarted kernel leave no rank behind."""

import json
import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]
PIDS = "print(*[process.pid for process in actor.session._job._job.ranks])"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernel():
    from jupyter_client.manager import start_new_kernel

    started = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
    env = {key: value for key, value in os.environ.items() if key not in started}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    manager, client = start_new_kernel(startup_timeout=120, env=env)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, source, timeout=300):
    """(error name or None, what the cell printed and its last value)."""
    said = []

    def hook(message):
        content = message["content"]
        if message["msg_type"] == "stream":
            said.append(content["text"])
        elif message["msg_type"] == "execute_result":
            said.append(content["data"]["text/plain"])

    reply = client.execute_interactive(source, timeout=timeout, output_hook=hook)["content"]
    return reply.get("ename"), "".join(said) + "\n".join(reply.get("traceback", []))


def gone(pids, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(_running(pid) for pid in pids):
        time.sleep(0.05)
    return not any(_running(pid) for pid in pids)


def _running(pid):
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_cell_runs_and_its_ranks_end_with_the_last(kernel):
    _, client = kernel
    said = []
    for source in CELLS:
        error, text = run(client, source)
        assert error is None, text
        said.append(text)
        if "num_gpus=2" in source:
            pids = run(client, PIDS)[1].split()
            assert len(pids) == 2 and all(_running(pid) for pid in pids)
    text = "".join(said)
    assert "64 responses scored here" in text, "2 steps, 8 prompts, 4 responses"
    assert "to_generation: 3 switches" in text and "KV cache" in text, "rank 0's output reaches the cell"
    assert gone(pids)


def test_an_interrupted_cell_ends_the_ranks_and_the_kernel_goes_on(kernel, tmp_path):
    manager, client = kernel
    assert run(client, CELLS[1])[0] is None
    pids = run(client, PIDS)[1].split()
    there = tmp_path / "there"
    message = client.execute(f"actor.session.call('tests.engine.session_checks:stay', {str(there)!r})")
    while len(list(tmp_path.iterdir())) < 2:  # both ranks are in the call
        time.sleep(0.05)
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=120))["parent_header"].get("msg_id") != message:
        pass
    assert reply["content"]["ename"] == "KeyboardInterrupt" and gone(pids)
    error, text = run(client, "actor.switch_to_generation()")
    assert error == "SessionError" and "interrupted from the keyboard" in text
    assert run(client, "1 + 1") == (None, "2")


def test_a_restarted_kernel_leaves_no_ranks(kernel):
    manager, client = kernel
    assert run(client, CELLS[1])[0] is None
    pids = run(client, PIDS)[1].split()
    assert all(_running(pid) for pid in pids)
    manager.restart_kernel(now=True)  # killed, as by the restart button of a kernel that does not answer
    client.wait_for_ready(timeout=120)
    assert gone(pids)
    assert run(client, "1 + 1") == (None, "2")
