"""Run a function on several real ranks (gloo on the CPU) and get rank 0's answer back.

    result = run_ranks("tests.engine.rank_checks:main", nproc=4, args={"tp": 2})

where ``def main(runtime, tp): ...; return {"loss": 1.0}`` is called on every rank with the initialised
`rl3d.distributed.bootstrap.Runtime`. Ranks are forked (:mod:`tests.forked`); a model in each still costs
seconds: put many checks into one call, and call it from a module- or session-scoped fixture.

``RL3D_TEST_DEVICE=cuda pytest tests/engine tests/models`` runs the same checks, in fp32, on GPUs. With one GPU all ranks
share it: ``RL3D_SHARE_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1`` and NCCL 2.30 or newer.
"""

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("RL3D_TEST_DEVICE", "cpu")
ROOT = Path(__file__).resolve().parent.parent


class RanksFailed(AssertionError):
    """A rank failed, or the ranks did not finish in time; the message holds the first failing rank's traceback."""


_forks: Any = None


def run_ranks(target: str, nproc: int, args: dict[str, Any] | list[Any] | None = None, timeout: float = 120, *,
              fresh: bool = False) -> Any:  # fmt: skip
    """Call ``target`` ("package.module:function") on ``nproc`` ranks as ``function(runtime, **args)``.

    Args:
        target: where the function is; it must be importable from the repository's root.
        nproc: number of ranks.
        args: JSON-serialisable keyword arguments (dict) or positional ones (list).
        timeout: seconds for everything, start-up included; all ranks are killed when it is over.
        fresh: start the ranks as a user does, with imports of their own; otherwise they are forked on the CPU from a
            process that has imported the libraries (:mod:`tests.forked`). For what is read from the environment while
            importing, and for how ranks start and end.

    Returns:
        rank 0's return value, through JSON (tuples become lists, dictionary keys become strings).

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    from rl3d.distributed.launcher import run_local

    with tempfile.TemporaryDirectory(prefix="rl3d-test-") as scratch:
        result_file = Path(scratch) / "result.json"
        argv = ["-m", "tests.ranks", target, json.dumps(args or {}), str(result_file), str(timeout)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        if DEVICE == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        start = run_local if fresh or DEVICE != "cpu" else _fork_server().run
        result = start(argv, nproc, log_dir=scratch, env=env, timeout_s=timeout)
        if result.code != 0:
            others = [rank for rank in range(nproc) if not result.traceback or rank != result.failed_rank]
            logs = "".join(_tail(Path(scratch) / f"rank{rank}.log", rank) for rank in others)
            raise RanksFailed(f"{target} on {nproc} ranks: {result.reason}\n{result.traceback}\n{logs}")
        return json.loads(result_file.read_text())


def _fork_server() -> Any:
    global _forks
    if _forks is None:
        from tests.forked import ForkServer

        _forks = ForkServer()
    return _forks


def rank_device() -> Any:
    """The device of this rank (for checks that do not get it from the runtime)."""
    import torch

    return torch.device("cpu") if DEVICE == "cpu" else torch.device(DEVICE, torch.cuda.current_device())


def _tail(path: Path, rank: int, lines: int = 15) -> str:
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    return f"--- rank {rank}, last lines ---\n" + "\n".join(text) + "\n" if text else ""


def main(target: str, args_json: str, result_file: str, timeout: str) -> None:
    from rl3d.distributed import bootstrap, failures, platform

    platform.prepare()
    runtime = bootstrap.init(timeout_s=float(timeout), device=DEVICE)
    if DEVICE != "cpu":  # the numbers are compared in fp32, and an actor's default there is bf16
        import torch

        from rl3d.engine import dtypes

        dtypes.DEFAULT_DTYPES[DEVICE] = torch.float32
    with failures.guard(runtime):
        module, _, name = target.partition(":")
        args = json.loads(args_json)
        function = getattr(import_module(module), name)
        result = function(runtime, **args) if isinstance(args, dict) else function(runtime, *args)
        if runtime.rank == 0:
            Path(result_file).write_text(json.dumps(result))
        runtime.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
