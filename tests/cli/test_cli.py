"""The rl3d command as people meet it: quick help, clean errors, dry runs, the environment report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rl3d
from rl3d.cli import main
from rl3d.utils import check_env

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/tiny_learns.yaml")
COMMANDS = [
    [],
    ["train"],
    ["plan"],
    ["scale"],
    ["config"],
    ["check-env"],
    ["prepare"],
    ["export"],
    ["convert"],
    ["convert", "import"],
    ["bench"],
    ["bench", "plan"],
]
# Ends with the heavy modules that were imported, and the user CPU seconds: wall time depends on the neighbours.
PROBE = """
import atexit, resource, sys
def say():
    heavy = {"torch", "deepspeed", "megatron", "transformers", "numpy", "pydantic", "rich"} & set(sys.modules)
    print("PROBE", sorted(heavy), resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
atexit.register(say)
from rl3d.cli import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(os.environ):
        if key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or key.startswith("SLURM_"):
            monkeypatch.delenv(key)


def probe(*words: str) -> tuple[str, str, float]:
    """(output, heavy modules imported, user CPU seconds) of one command that succeeds."""
    command = [sys.executable, "-c", PROBE, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    heavy, seconds = done.stderr.removeprefix("PROBE ").rsplit(" ", 1)
    return done.stdout, heavy, float(seconds)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c) or "rl3d")
def test_help_is_quick(command: list[str]) -> None:
    output, heavy, seconds = probe(*command, "--help")
    assert output.startswith("usage: rl3d")
    assert heavy == "[]"
    assert seconds < 1.0


def test_checking_a_run_needs_no_torch() -> None:
    _, heavy, _ = probe("train", TINY, "--dry-run")
    assert heavy == "['pydantic', 'rich']"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"rl3d {rl3d.__version__}\n"


@pytest.mark.parametrize("module", [["-m", "rl3d"], [str(Path(sys.executable).with_name("rl3d"))]], ids=["module", "script"])
def test_errors_are_a_clean_block(module: list[str]) -> None:
    command = [sys.executable, *module] if module[0] == "-m" else module
    done = subprocess.run(
        [*command, "train", TINY, "rollout.nn=3", "algorithm.clip_coef=7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ") and lines[0].endswith("tiny_learns.yaml cannot run:")
    assert len(lines) == 3 and "did you mean 'n'" in lines[1] and "algorithm.clip_coef = 7" in lines[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "configs/nope.yaml"], "no such configuration file; there are"),
        (["train", TINY, "layout.gen=tp3"], "choose layout.gen among the divisors of 4"),
        (["train", TINY, "--ranks", "3"], "3 ranks do not divide by tp x pp = 4"),
        (["config", "algorithm.rl"], "did you mean 'algorithm.lr'?"),
        (["prepare", "nope"], "no model 'nope' to prepare; there is smollm2-135m-instruct"),
        (["export", "runs/none", "out"], "no such run or checkpoint directory"),
    ],
)
def test_errors_exit_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and expected in captured.err


@pytest.mark.parametrize("words", [["train", TINY, "--rank"], ["train"], ["nope"], ["train", TINY, "--ranks", "x"]])
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    assert "usage: rl3d" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", TINY, "--dry-run", "trainer.steps=3"],
        ["train", "--dry-run", TINY, "trainer.steps=3"],
        ["train", TINY, "trainer.steps=3", "--dry-run", "rollout.n=8"],
        ["--local_rank=0", "train", TINY, "trainer.steps=3", "--dry-run"],  # as deepspeed starts a module
        ["--local-rank", "0", "train", TINY, "trainer.steps=3", "--dry-run"],
    ],
)
def test_dry_run(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    out = capsys.readouterr().out
    for text in ("tp2.pp2.dp1.zero1", "tp4, 1 copy of the model", "4 on cpu", "3 steps", "tiny:copy"):
        assert text in out
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_computed_stops_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What only the models' room knows, a family or a RoPE scaling, is refused by the command itself."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for change, words in (
        ({"model_type": "gemma3_text"}, ("model.path", "model_type 'gemma3_text' is not supported", "qwen3")),
        ({"model_type": "llama", "rope_parameters": rope}, ("model.path", "'dynamic' is not supported", "longest sequence")),
    ):
        config = {**sizes, "vocab_size": 64, "max_position_embeddings": 128, **change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["train", TINY, "--dry-run", "model.random=null", f"model.path={tmp_path}"]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error


def test_started_rank_takes_the_world_from_its_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert main(["train", TINY, "--dry-run"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 says it, once
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", TINY, "--dry-run"]) == 2
    assert "layout.ranks = 4: 2 ranks were started" in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert main(["train", TINY, "--dry-run"]) == 2
    assert "MASTER_PORT" in capsys.readouterr().err


def test_config_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "algorithm.lr"]) == 0
    out = capsys.readouterr().out
    assert "Peak learning rate of AdamW." in out and "1e-06" in out
    assert main(["config"]) == 0
    table = capsys.readouterr().out
    assert "layout.on_gpus" in table and "rollout.max_new_tokens" in table


def test_check_env(capsys: pytest.CaptureFixture[str]) -> None:
    found = check_env()
    lines = capsys.readouterr().out.splitlines()
    names = ["Python", "PyTorch", "CUDA", "NCCL", "DeepSpeed", "Megatron-core", "Transformers", "vLLM"]
    names += ["Transformer Engine", "flash-attention", "SLURM"]
    assert len(lines) == len(names) == len(found)
    for line, name, part in zip(lines, names, found.values(), strict=True):
        assert line.startswith(f"[{'✓' if part['ok'] else '✗'}] {name}")
        assert part["ok"] or part["detail"]
    required = {key for key, part in found.items() if part["required"]}
    assert required == {"python", "torch", "deepspeed", "megatron_core", "transformers"}
    assert all(found[key]["ok"] and found[key]["version"] for key in required)
