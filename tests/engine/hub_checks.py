"""What each rank does in test_hub.py."""

import dataclasses
import time
from pathlib import Path

import torch

from rl3d import Actor
from rl3d.config.hub import HubError
from rl3d.engine.download import local_directory

SHORTER_THAN_SLOW = 6.0  # s: less than org/slow takes, far more than one of its files does on a busy machine


def main(runtime, caches: list[str]):
    out: dict[str, object] = {}
    gather = _gatherer(runtime)

    # one node: a model in several files, which together take longer than the time-out
    start = time.monotonic()
    directory = local_directory("org/slow", dataclasses.replace(runtime, timeout_s=SHORTER_THAN_SLOW))
    out["slow"] = gather([str(directory), time.monotonic() - start])

    actor = Actor("org/tiny@v1", gen=f"tp{runtime.world_size}", dtype="float32", max_sequence_length=32)
    out["directory"] = str(actor.source.directory)
    out["greedy"] = actor.rollout(torch.tensor([[5, 6, 7]]), max_new_tokens=8, temperature=1e-4).sequences[0].tolist()

    out["missing"] = gather(_error(lambda: local_directory("org/none@v2", runtime)))
    out["stalled"] = gather(_error(lambda: local_directory("org/stalled", dataclasses.replace(runtime, timeout_s=1.5))))

    # two nodes with caches of their own, which hold different revisions
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, caches[runtime.rank]
    nodes = dataclasses.replace(runtime, nodes=tuple(range(runtime.world_size)))
    out["differ"] = gather(_error(lambda: local_directory("org/differs", nodes)))
    out["lacking"] = gather(_error(lambda: local_directory("org/first", nodes)))
    return out


def _error(action) -> str:
    try:
        return f"no error: {action()}"
    except HubError as error:
        return str(error)


def _gatherer(runtime):
    def gather(value):
        values = [None] * runtime.world_size
        torch.distributed.all_gather_object(values, value, group=runtime.cpu_group)
        return values

    return gather


def cache(root: Path, repo: str, sha: str, source: Path) -> None:
    """huggingface_hub's layout by hand: refs/main names the commit, snapshots/COMMIT holds its files."""
    place = root / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(sha)
    (place / "snapshots").mkdir()
    (place / "snapshots" / sha).symlink_to(source)
