"""``rl3d train`` and ``rl3d export`` as a person types them: two ranks, a tiny random model, a run directory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

from rl3d.data.tiny import make_tiny_model, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "layout.ranks=2", "layout.train=tp1.pp2.zero1", "layout.gen=tp2", "layout.verify=full", "data.size=24",
    "algorithm.batch_size=4", "algorithm.mini_batch_size=2", "rollout.n=4", "model.random.config.num_hidden_layers=2",
]  # fmt: skip


def rl3d(*words, cwd, wait=True, **options):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rl3d", *map(str, words)]
    if wait:
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, **options)
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_the_command_line(tmp_path):
    done = rl3d("train", ROOT / "configs/tiny_learns.yaml", "trainer.steps=2", "trainer.name=small", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        "[Step 0] Sampling 4 prompts → 16 responses",
        "[Step 0] Computing rewards for 16 samples...",
        "[Step 0] Updating actor with 2 mini-batches...",
        "train tp1.pp2.dp1.zero1 → generate tp2 × 1",
    ]
    for line in lines:
        assert line in done.stdout, done.stdout
    assert "[Step 1] Actor loss: " in done.stdout and "Traceback" not in done.stderr
    assert "Warning" not in done.stdout + done.stderr, "the libraries' known noise is silenced"
    run = tmp_path / "runs/small"
    assert [row["step"] for row in rows(run)] == [0, 1]
    for name in ("config.yaml", "logs/rank0.log", "logs/rank1.log", "samples/step_1.txt", "checkpoints/latest"):
        assert (run / name).exists(), name

    exported = rl3d("export", run, tmp_path / "out", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    for directory in (tmp_path / "out", run / "hf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        assert model.config.vocab_size == 79
        transformers.AutoTokenizer.from_pretrained(directory)
    again = rl3d("export", run, tmp_path / "out", cwd=tmp_path)
    assert again.returncode == 2 and "not empty" in again.stderr

    other = rl3d("train", ROOT / "configs/tiny_learns.yaml", "trainer.steps=3", "trainer.name=small", *SMALL,
                 "layout.train=tp2.pp1.zero1", cwd=tmp_path)  # fmt: skip
    assert other.returncode == 0, other.stderr
    assert "2 steps done, 1 to go, carried over from tp1.pp2.dp1.zero1 on 2 ranks" in other.stdout
    assert [row["step"] for row in rows(run)] == [0, 1, 2]


@pytest.mark.slow
def test_tiny_learns_learns(tmp_path):
    start = time.monotonic()
    done = rl3d("train", ROOT / "configs/tiny_learns.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = [row["critic/score/mean"] for row in rows(tmp_path / "runs/tiny_learns")]
    assert scores[0] < 0.2 and min(scores[-5:]) > 0.8
    assert time.monotonic() - start < 240
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/tiny_learns/hf")


@pytest.mark.slow
@pytest.mark.parametrize(("critic", "reached"), [(True, 0.8), (False, 0.6)])
def test_tiny_ppo_learns(tmp_path, critic, reached):
    """One sample of each prompt: without a critic nothing says what to expect of it, and learning takes longer."""
    start = time.monotonic()
    done = rl3d("train", ROOT / "configs/tiny_ppo.yaml", f"algorithm.use_critic={critic}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("[Step 0] Updating critic with 2 mini-batches..." in done.stdout) == critic
    scores = [row["critic/score/mean"] for row in rows(tmp_path / "runs/tiny_ppo")]
    assert scores[0] < 0.2 and min(scores[-5:]) > reached
    assert time.monotonic() - start < 240
    assert (tmp_path / "runs/tiny_ppo/critic/config.json").exists() == critic


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end(tmp_path):
    """kill -9 of the launcher after the checkpoint of step 3; its ranks go with it; the same command finishes the run."""
    words = ["train", ROOT / "configs/tiny_learns.yaml", "trainer.steps=6", "trainer.save_every=3", *SMALL]
    assert rl3d(*words, "trainer.name=straight", cwd=tmp_path).returncode == 0
    killed = rl3d(*words, "trainer.name=killed", cwd=tmp_path, wait=False, start_new_session=True)
    saved = tmp_path / "runs/killed/checkpoints/step_000003/state.json"
    end = time.monotonic() + 120
    while not saved.exists() and time.monotonic() < end and killed.poll() is None:
        time.sleep(0.05)
    assert saved.exists()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    time.sleep(2)
    done = rl3d(*words, "trainer.name=killed", cwd=tmp_path)
    assert done.returncode == 0 and "Resumed from" in done.stdout, done.stdout + done.stderr
    a, b = (tmp_path / "runs" / name for name in ("straight", "killed"))
    for row, other in zip(rows(a), rows(b), strict=True):
        same = [k for k in row if not k.startswith(("timing_s/", "perf/"))]
        assert {k: row[k] for k in same} == {k: other[k] for k in same}
    for file in sorted((a / "hf").glob("*.safetensors")):
        assert file.read_bytes() == (b / "hf" / file.name).read_bytes()


@pytest.mark.slow
def test_rewards_of_every_kind_in_one_run(tmp_path, monkeypatch):
    """A function, a service and a model; models by hub id; two replicas, each of which scores its own samples."""
    from tests.hub import Hub
    from tests.rewards.test_http import Service
    from tests.rewards.test_models import decoder

    train_tokenizer(tmp_path / "judge")
    decoder().save_pretrained(tmp_path / "judge")
    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 79,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    make_tiny_model(tmp_path / "policy", shape)
    hub = Hub()
    hub.repos = {"org/judge": {"main": tmp_path / "judge"}, "org/policy": {"v1": tmp_path / "policy"}}
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", str(tmp_path / "home")), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)
    service = Service()
    service.script = [lambda h: h.answer(503, b"not yet")] + [lambda h: h.answer(200, {"scores": [0.25]})] * 1000
    rewards = (
        "reward={functions: [{function: 'rl3d.rewards.tiny:score'}, {model: org/judge, weight: 0.5, residency: host}, "
        f"{{url: '{service.url}', weight: 2.0, timeout_s: 5}}]}}"
    )
    words = [word for word in SMALL if not word.startswith("model.")]
    model = ["model={path: org/policy@v1, dtype: float32}", "trainer.steps=2", "trainer.name=run", "layout.gen=tp1"]
    done = rl3d("train", "tiny_learns", *words, *model, rewards, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (tmp_path / "runs/run/samples/step_1.jsonl").read_text().splitlines()]
    for row in samples:
        parts = row["rewards"]
        expected = parts["rl3d.rewards.tiny:score"] + 0.5 * parts["org/judge"] + 2 * parts[service.url]
        assert row["score"] == pytest.approx(expected, abs=1e-6)
        assert parts[service.url] == 0.25
    assert len({row["rewards"]["org/judge"] for row in samples}) > 1
    assert len(service.bodies) == 2 * 16 + 1
    assert sorted(hub.downloads(".safetensors")) == ["model.safetensors"] * 2, "each once, though two ranks need them"
    service.server.shutdown()
    hub.close()
