"""Where metrics and samples are written: metrics.jsonl, TensorBoard, Weights & Biases, samples/."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl3d.trainer.metrics import json_value, plain


class Backend(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes one row of metrics a step to every backend that was asked for. Use it on rank 0 only, or give ``rank``.

    Args:
        backends: among ``jsonl``, ``tensorboard``, ``wandb`` (``console`` is not ours and is passed over).
        run_dir: directory of the run; ``metrics.jsonl`` and ``tensorboard/`` are made in it.
        config: the resolved configuration as plain data, shown by W&B.
        start_step: first step that this process will log. Rows of an earlier, longer-lived process at or after it are
            moved to ``metrics.jsonl.bak``: they will be computed again.
        rank: other ranks than 0 write nothing.

    A backend that is not installed costs one warning line, never the run.
    """

    def __init__(
        self,
        backends: Iterable[str],
        run_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        start_step: int = 0,
        rank: int = 0,
    ) -> None:
        self._backends: list[Backend] = []
        if rank != 0:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(backends):
            if name == "jsonl":
                self._backends.append(JsonlBackend(directory / "metrics.jsonl", start_step))
            elif name == "tensorboard":
                self._try(name, lambda: TensorBoardBackend(directory / "tensorboard", start_step))
            elif name == "wandb":
                self._try(name, lambda: WandbBackend(directory, config))
            elif name != "console":
                raise ValueError(f"logger {name!r}: expected console, jsonl, tensorboard or wandb")

    def _try(self, name: str, make: Any) -> None:
        try:
            self._backends.append(make())
        except ImportError as error:
            _warn(f"{name} is not installed ({error}); its metrics are not written (pip install {name})")
        except Exception as error:  # W&B without a login or a network must not end a run
            _warn(f"{name} did not start ({type(error).__name__}: {error}); its metrics are not written")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one row. Values may be numbers, 0-d tensors, strings; NaN and infinities are kept."""
        row = {key: plain(value) for key, value in metrics.items()}
        for backend in list(self._backends):
            try:
                backend.log(step, row)
            except Exception as error:
                if isinstance(backend, JsonlBackend):
                    raise
                self._backends.remove(backend)
                _warn(f"{type(backend).__name__} failed and is off from step {step}: {error}")

    def close(self) -> None:
        """Flush and close every backend; calling it twice is harmless."""
        while self._backends:
            self._backends.pop().close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class JsonlBackend:
    """One JSON object a line, flushed at once; ``step`` is its first key."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self.path = path
        _cut_rows(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {"step": step, **{key: json_value(value) for key, value in metrics.items()}}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_rows(path: Path, start_step: int) -> None:
    """Keep the rows before ``start_step``; append the others, and lines that are no rows, to ``path``.bak."""
    if not path.exists():
        return
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            before = isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] < start_step
        except ValueError:  # a line that a killed process left half-written
            before = False
        (kept if before else cut).append(line)
    if not cut:
        return
    with path.with_name(path.name + ".bak").open("ab") as backup:
        backup.write(b"".join(line + b"\n" for line in cut))
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(scratch, path)


class TensorBoardBackend:
    """Scalars for TensorBoard; rows of an earlier process at or after ``start_step`` are purged from the view."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start_step if start_step else None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            if isinstance(value, (bool, int, float)):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbBackend:
    """Weights & Biases; the run's directory names the run, so that a resumed run continues the same curve."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any] | None) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rl3d"),
            name=run_dir.name,
            id=os.environ.get("WANDB_RUN_ID", run_dir.name),
            resume="allow",
            dir=str(run_dir),
            config=dict(config or {}),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def write_samples(run_dir: str | Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Write samples of one step to ``samples/step_{step}.jsonl`` and, to be read, ``samples/step_{step}.txt``.

    A row has ``prompt`` and ``response`` (text) and whatever else is known: ``score``, ``answer``, ``finish_reason``,
    ``uid``. Returns the JSONL file, or None when there are no rows.
    """
    if not rows:
        return None
    directory = Path(run_dir) / "samples"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(json_value({"step": step, **row}), ensure_ascii=False, allow_nan=False) + "\n")
    with path.with_suffix(".txt").open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            facts = {key: json_value(plain(v)) for key, v in row.items() if key not in ("prompt", "response")}
            head = ", ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, {}, []))
            file.write(f"=== step {step}, sample {index}" + (f": {head}" if head else "") + "\n")
            file.write(f"--- prompt\n{row.get('prompt', '')}\n--- response\n{row.get('response', '')}\n\n")
    return path


def _warn(text: str) -> None:
    print(f"rl3d: warning: {text}", file=sys.stderr, flush=True)
