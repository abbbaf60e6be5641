"""Hub ids in a configuration, against a hub on loopback and huggingface_hub itself; without torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl3d.config.hub import HubId, missing_files
from tests.hub import Hub, commit

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
RUN = """
model: {path: org/small@v1, tokenizer: org/words}
layout: {train: tp1.pp1.zero1, ranks: 1, device: cpu}
data: {train: "tiny:copy", max_prompt_tokens: 24}
rollout: {n: 4, max_new_tokens: 8}
reward: {function: "json:loads"}
algorithm: {batch_size: 8, kl_coef: 0}
"""


@pytest.fixture
def hub(tmp_path):
    small, words = tmp_path / "small", tmp_path / "words"
    for directory, name, text in (
        (small, "config.json", json.dumps(CONFIG)),
        (small, "model.safetensors", "weights"),
        (small, "tokenizer.json", "{}"),
        (small, "chat_template.jinja", "{{ messages }}"),
        (small, "modeling_small.py", "raise SystemExit('remote code ran')"),
        (small, "pytorch_model.bin", "the same weights again"),
        (small, "consolidated.safetensors", "and again"),
        (small, "original/model.safetensors", "and again"),
        (words, "tokenizer_config.json", "{}"),
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    hub = Hub()
    hub.repos = {"org/small": {"main": small, "v1": small}, "org/words": {"main": words}}
    yield hub
    hub.close()


def python(code: str, hub: Hub, cache: Path, **env: str) -> subprocess.CompletedProcess:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, cwd=cache, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("Qwen/Qwen2.5-1.5B@v1.0", ("Qwen/Qwen2.5-1.5B", "v1.0")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("smollm2-135m-instruct", None),  # a name under models/
        ("./org/name", None),
        ("/data/models/llama", None),
        ("~/models/llama", None),
        ("a/b/c", None),
        ("org/name@", None),
    ],
)
def test_what_is_an_id(text, expected):
    found = HubId.parse(text)
    assert (found and (found.repo, found.revision)) == expected


def test_a_directory_of_that_name_is_a_directory(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert HubId.parse("org/name") is None and HubId.parse("org/other") is not None


def test_dry_run_fetches_configurations_only_and_needs_no_torch(hub, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    code = (
        "import sys; from rl3d.cli import main; code = main(['train', 'run.yaml', '--dry-run']); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = python(code, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "org/small@v1 (llama" in done.stdout and done.stdout.endswith("False\n")
    assert sorted(hub.downloads()) == ["config.json", "tokenizer_config.json"]
    asked = len(hub.requests)
    assert python(code, hub, tmp_path, HF_HUB_OFFLINE="1").returncode == 0, "the cache has what a check needs"
    assert len(hub.requests) == asked

    (tmp_path / "run.yaml").write_text(RUN.replace("@v1", "@v9").replace("org/words", "org/none"))
    done = python(code, hub, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stderr
    assert "hf download org/small --revision v9`" in said and "hf download org/none`" in said
    assert str(tmp_path / "org/small@v9") in said and "give a Hugging Face model directory" in said
    assert "RevisionNotFoundError" in said and "RepositoryNotFoundError" in said


def test_a_model_is_its_weights_configuration_and_tokenizer(hub, tmp_path):
    code = (
        "from rl3d.config.hub import HubId; import os; d = HubId.parse('org/small').fetch({}); "
        "print(d.name, *sorted(os.listdir(d)))"
    )
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    done = python(code.format(""), hub, tmp_path)
    assert done.stdout.split() == [commit("org/small", "main"), *wanted], done.stderr
    assert sorted(hub.downloads()) == wanted
    with_code = python(code.format("remote_code=True"), hub, tmp_path)
    assert with_code.stdout.split()[1:] == sorted([*wanted, "modeling_small.py"])
    tokenizer = python(code.format("'tokenizer'"), hub, tmp_path, HF_HOME=str(tmp_path / "other"))
    assert tokenizer.stdout.split()[1:] == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_offline_takes_the_cache_or_says_what_to_run(hub, tmp_path):
    code = "from rl3d.config.hub import HubId; print(HubId.parse('org/small').fetch())"
    missing = python(code, hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in missing.stderr and "run `hf download org/small`" in missing.stderr
    assert hub.requests == []
    online = python(code, hub, tmp_path)
    assert online.returncode == 0, online.stderr
    asked = len(hub.requests)
    offline = python(code, hub, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout == online.stdout and len(hub.requests) == asked
    (Path(online.stdout.strip()) / "model.safetensors").unlink()
    damaged = python(code, hub, tmp_path, HF_HUB_OFFLINE="1")
    assert damaged.returncode == 1 and "hf download org/small" in damaged.stderr


def test_a_hub_that_does_not_answer_is_asked_once(hub, tmp_path):
    code = "from rl3d.config.hub import HubId; print(HubId.parse('org/small').fetch())"
    online = python(code, hub, tmp_path)
    hub.close()
    start = time.monotonic()
    cached = python(code, hub, tmp_path)
    assert cached.stdout == online.stdout, cached.stderr
    missing = python(code, hub, tmp_path, HF_HOME=str(tmp_path / "other"))
    assert time.monotonic() - start < 40, "huggingface_hub alone retries for 24 seconds, in each of the two"
    assert "does not answer" in missing.stderr and "run `hf download org/small`" in missing.stderr
    assert "Retrying" not in missing.stderr


def test_missing_shards_are_named(tmp_path):
    assert missing_files(tmp_path) == ["config.json", "model.safetensors"]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}')
    (tmp_path / "s1.safetensors").write_text("")
    assert missing_files(tmp_path) == ["s2.safetensors"]
