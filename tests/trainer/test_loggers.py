"""metrics.jsonl, TensorBoard and the samples files, with resumed runs and missing libraries."""

import builtins
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl3d.trainer.loggers import MetricsWriter, write_samples


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_flushed_row_by_row(tmp_path: Path) -> None:
    writer = MetricsWriter(["console", "jsonl"], tmp_path / "runs/a")
    writer.log(0, {"actor/pg_loss": torch.tensor(0.5), "bad": math.nan, "text": "é"})
    path = tmp_path / "runs/a/metrics.jsonl"
    assert rows(path) == [{"step": 0, "actor/pg_loss": 0.5, "bad": "NaN", "text": "é"}]
    writer.log(1, {"actor/pg_loss": 1})
    writer.close()
    writer.close()
    assert [row["step"] for row in rows(path)] == [0, 1]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(["jsonl", "tensorboard"], tmp_path / "run", rank=1) as writer:
        writer.log(0, {"a": 1})
    assert not (tmp_path / "run").exists()


def test_resume_loses_nothing(tmp_path: Path) -> None:
    path, backup = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.bak"
    with MetricsWriter(["jsonl"], tmp_path) as writer:
        for step in range(5):
            writer.log(step, {"value": step})
    with path.open("ab") as file:
        file.write(b'{"step": 5, "val')  # killed in the middle of a row
    with MetricsWriter(["jsonl"], tmp_path, start_step=3) as writer:
        writer.log(3, {"value": 30})
    assert [row["value"] for row in rows(path)] == [0, 1, 2, 30]
    assert backup.read_bytes().splitlines()[-1] == b'{"step": 5, "val'
    with MetricsWriter(["jsonl"], tmp_path, start_step=2):
        pass
    assert [row["step"] for row in rows(path)] == [0, 1]
    assert [json.loads(line)["value"] for line in backup.read_text().splitlines() if line.endswith("}")] == [
        3,
        4,
        2,
        30,
    ]
    with MetricsWriter(["jsonl"], tmp_path, start_step=2):
        pass  # nothing to cut: the backup stays as it is
    assert len(backup.read_text().splitlines()) == 5


def test_tensorboard_holds_the_numbers(tmp_path: Path) -> None:
    with MetricsWriter(["tensorboard"], tmp_path) as writer:
        writer.log(0, {"critic/score/mean": 0.25, "note": "text is no curve"})
        writer.log(1, {"critic/score/mean": torch.tensor(0.75)})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(0, 0.25), (1, 0.75)]


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_missing_backend_is_one_warning(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module == package:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with MetricsWriter([name, "jsonl"], tmp_path) as writer:
        writer.log(0, {"a": 1})
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1}]


def test_unknown_backend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logger 'mlflow': expected console, jsonl, tensorboard or wandb"):
        MetricsWriter(["mlflow"], tmp_path)


def test_samples_to_read(tmp_path: Path) -> None:
    found = write_samples(
        tmp_path, 3, [{"prompt": "1 + 1?", "response": "2", "score": 1.0, "answer": None, "logprob": -math.inf}]
    )
    assert found == tmp_path / "samples/step_3.jsonl"
    (row,) = rows(found)
    assert (row["step"], row["response"], row["logprob"]) == (3, "2", "-Infinity")
    text = found.with_suffix(".txt").read_text()
    assert text.startswith("=== step 3, sample 0: score 1.0, logprob -Infinity\n--- prompt\n1 + 1?\n--- response\n2\n")
    assert write_samples(tmp_path, 4, []) is None
