"""What the README shows is what the code does: the example runs, the settings are read, table and picture are current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from rl3d.cli import main
from rl3d.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _python(*argv: str, cwd: Path) -> str:
    # One plain process, as a person starts it: not one rank of whatever runs these tests.
    started = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")
    env = {key: value for key, value in os.environ.items() if key not in started}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_grpo_in_50_lines_runs_as_one_plain_process(tmp_path):
    script = ROOT / "examples" / "grpo_in_50_lines.py"
    assert len(script.read_text().splitlines()) < 50
    said = _python(str(script), "--steps", "2", cwd=tmp_path)
    assert re.findall(r"^step (\d): reward 0\.\d{3}$", said, re.MULTILINE) == ["0", "1"]
    run = tmp_path / "runs" / "grpo_in_50_lines"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows) < 1e-5
    assert (run / "hf" / "config.json").is_file()


def test_the_readme_configuration_is_read(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert text is not None
    (tmp_path / "config.yaml").write_text(text[1])
    config = load_config(tmp_path / "config.yaml")
    assert str(config.layout.train_layout.resolve(8)) == "tp2.pp2.dp2.zero1"
    assert config.layout.gen_layout.replicas(8) == 2
    assert set(yaml.safe_load(text[1])) == {"model", "layout", "data", "rollout", "reward", "algorithm", "trainer"}


def test_the_readme_program_is_short_and_compiles():
    text = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert text is not None
    assert len(text[1].splitlines()) < 50
    compile(text[1], "README.md", "exec")


def test_the_plan_in_the_readme_is_the_planners(capsys):
    assert main(["plan", "llama2-7b", "--train", "tp2.pp2.dp2.zero1", "--gen", "tp4"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    # how it is cut into messages, and how long that took, is not what the README tells
    passing = ("│ boxes, buckets", "│ staging MiB", "│ plan ", "predicted switch")
    lasting = [line for line in printed if line and not line.startswith(passing)]
    assert len(lasting) > 15
    assert [line for line in lasting if line not in README.splitlines()] == []


def test_the_picture_is_of_the_layouts(tmp_path):
    _python(str(ROOT / "docs" / "draw_layouts.py"), "layouts.svg", cwd=tmp_path)
    assert (tmp_path / "layouts.svg").read_text() == (ROOT / "docs" / "img" / "layouts.svg").read_text()
