"""Models from a hub, fetched once on each node while its other ranks wait."""

import itertools
import json
import threading
import time
from pathlib import Path

import torch.distributed as dist

from rl3d.config.hub import HubError, HubId, Part
from rl3d.distributed.bootstrap import Runtime

_fetches = itertools.count()  # every rank fetches the same models in the same order, so the numbers agree


def local_directory(model: str | Path, runtime: Runtime, part: Part = "model", *, remote_code: bool = False) -> Path:
    """The directory that ``model`` is, or that its hub id is fetched to. Collective over all ranks for a hub id.

    The first rank of each node downloads (or finds everything in the node's cache). The others wait for as long as the
    download grows; one that has not for ``runtime.timeout_s`` is given up. A failure on any node is raised on all ranks.

    Raises:
        HubError: the model is not to be had, or nodes hold different revisions of it.
    """
    hub_id = HubId.parse(model)
    if hub_id is None:
        return Path(model).expanduser()
    store = dist.PrefixStore(f"fetch/{next(_fetches)}", runtime.new_store())
    mine = runtime.nodes[runtime.rank]
    if runtime.nodes.index(mine) == runtime.rank:
        _fetch(hub_id, part, remote_code, store, mine, runtime.timeout_s)
    found: list[dict[str, str]] = []
    for node in range(max(runtime.nodes) + 1):
        found.append(_wait(hub_id, store, node, runtime))
    for node, outcome in enumerate(found):
        if "error" in outcome:
            where = f" (node {node}, rank {runtime.nodes.index(node)})" if len(found) > 1 else ""
            raise HubError(outcome["error"] + where)
    revisions = {Path(outcome["directory"]).name for outcome in found}
    if len(revisions) > 1:
        raise HubError(
            f"model {str(hub_id)!r}: nodes hold different revisions of it, {' and '.join(sorted(revisions))}; pin one, "
            f"as {hub_id.repo}@{min(revisions)}"
        )
    return Path(found[mine]["directory"])


def _fetch(hub_id: HubId, part: Part, remote_code: bool, store: dist.Store, node: int, timeout_s: float) -> None:
    """Download and publish the outcome, whatever it is; meanwhile count up as the cache grows."""
    done = threading.Event()
    pulse = threading.Thread(target=_pulse, args=(hub_id, store, node, done, timeout_s), daemon=True)
    pulse.start()
    try:
        outcome = {"directory": str(hub_id.fetch(part, remote_code=remote_code))}
    except HubError as error:
        outcome = {"error": str(error)}
    except BaseException as error:
        store.set(f"{node}/outcome", json.dumps({"error": f"model {str(hub_id)!r}: {type(error).__name__}: {error}"}))
        raise
    finally:
        done.set()
        pulse.join()  # the store's connection is one thread's at a time
    store.set(f"{node}/outcome", json.dumps(outcome))


def _pulse(hub_id: HubId, store: dist.Store, node: int, done: threading.Event, timeout_s: float) -> None:
    size = -1
    while not done.wait(min(2.0, timeout_s / 4)):
        try:
            now = sum(file.stat().st_size for file in hub_id.cache.glob("blobs/*"))
        except OSError:  # a finished file was renamed between the look and the measure
            continue
        if now != size:
            size = now
            store.add(f"{node}/pulse", 1)


def _wait(hub_id: HubId, store: dist.Store, node: int, runtime: Runtime) -> dict[str, str]:
    beats, deadline = 0, time.monotonic() + runtime.timeout_s
    while not store.check([f"{node}/outcome"]):
        now = store.add(f"{node}/pulse", 0)
        if now != beats:
            beats, deadline = now, time.monotonic() + runtime.timeout_s
        if time.monotonic() > deadline:
            return {"error": f"model {str(hub_id)!r}: its download has not grown for timeout_s = {runtime.timeout_s:g} s; "
                             f"run `{hub_id.command}` on each node first"}  # fmt: skip
        time.sleep(0.2)
    return json.loads(store.get(f"{node}/outcome"))
