"""``verify`` within tolerances and by logits, and ``inspect``: what they say, and their exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl3d.cli import main
from rl3d.data.tiny import make_tiny_model
from rl3d.io.convert import hf_to_megatron
from tests.io.test_convert import KEY, edited, tensors
from tests.models.zoo import save
from tests.ranks import ROOT


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("verify"), "llama-mqa")


def test_tolerance_is_allclose(source: Path, tmp_path: Path, capsys: Any) -> None:
    hf_to_megatron(source, tmp_path / "m")
    moved = edited(source, tmp_path / "moved", lambda t: t.update({KEY: t[KEY] * (1 + 1e-3)}))
    a, b = tensors(moved)[KEY].double(), tensors(source)[KEY].double()
    words = ["convert", "verify", str(moved), str(tmp_path / "m")]
    for rtol, atol in [(2e-3, 0.0), (0.9e-3, 0.0), (0.0, 0.1), (1e-4, 1e-4), (0.0, 0.0)]:
        right = torch.allclose(a, b, rtol=rtol, atol=atol)
        capsys.readouterr()
        assert main([*words, "--rtol", str(rtol), "--atol", str(atol)]) == int(not right)
        err = capsys.readouterr().err
        if not right:
            beyond = ~torch.isclose(a, b, rtol=rtol, atol=atol)
            assert KEY in err and err.count("differs:") == 1 and f"{int(beyond.sum()):,} of {a.numel():,}" in err
            assert f"up to {float((a - b).abs()[beyond].max()):.3g}" in err
    lower = tmp_path / "lower"
    assert main(["convert", "import", str(source), str(lower), "--dtype", "bfloat16"]) == 0
    assert main(["convert", "verify", str(source), str(lower)]) == 2  # bits of two dtypes
    assert "--rtol and --atol" in capsys.readouterr().err
    assert main(["convert", "verify", str(source), str(lower), "--rtol", str(2**-8)]) == 0  # half a unit of 8 bits
    assert main(["convert", "verify", str(source), str(lower), "--rtol", str(2**-10)]) == 1
    assert main(["convert", "verify", str(source), "--rtol", "1"]) == 2
    assert "name B" in capsys.readouterr().err


def test_inspect_says_what_is_there(source: Path, tmp_path: Path, capsys: Any) -> None:
    made = hf_to_megatron(source, tmp_path / "m", tp=2, pp=2)
    right = {name: list(t.shape) for name, t in tensors(source).items()}

    def inspect(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["convert", "inspect", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    hf = inspect(str(source))
    assert (hf["format"], hf["family"], hf["layout"]) == ("hf", "llama", "whole tensors")
    assert hf["bytes"] == sum(t.nbytes for t in tensors(source).values())
    megatron = inspect(str(tmp_path / "m"), "--fingerprints")
    assert megatron["format"] == "torch_dist" and megatron["fingerprint"] == made["fingerprint"]
    assert megatron["layout"] == "files of 4 ranks; loads at any layout, cut for tp2.pp2"
    shapes = {p["name"]: p["shape"] for p in megatron["parameters"]}
    assert shapes["decoder.layers.1.mlp.linear_fc2.weight"] == right[KEY] and len(shapes) == 4 * 6 + 3
    assert main(["convert", "inspect", str(tmp_path / "m")]) == 0
    assert f"27 parameters, {hf['bytes']:,} bytes" in capsys.readouterr().out
    os.rename(tmp_path / "m" / "hf", tmp_path / "away")
    stored = inspect(str(tmp_path / "m"))
    assert stored["family"] is None and "--hf" in stored["note"]
    fc1 = next(p for p in stored["parameters"] if p["name"] == "decoder.layers.mlp.linear_fc1.weight")
    assert (fc1["shape"], fc1["pieces"]) == ([4, 128, 64], 4 * 2 * 2)
    assert inspect(str(tmp_path / "m"), "--hf", str(source))["family"] == "llama"

    step = tmp_path / "step_000007"
    step.mkdir()
    (step / "hf").symlink_to(source)
    (step / "state.json").write_text(json.dumps({"step": 7, "layout": "tp2.pp1.dp2.zero1", "world_size": 4}))
    run = inspect(str(step))
    assert (run["format"], run["layout"]) == ("rl3d", "written by 4 ranks at tp2.pp1.dp2.zero1, step 7")


def convert(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "checkpoints_tools", *words], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_logits_of_transformers_and_megatron_core(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
             "intermediate_size": 64, "tie_word_embeddings": True}  # fmt: skip
    source = make_tiny_model(tmp_path / "hf", {"model_type": "qwen3", **sizes})
    hf_to_megatron(source, tmp_path / "m", tp=2)
    (tmp_path / "texts").write_text("12 + 7 =\n\nabc dcba\n")
    same = convert("verify", str(source), str(tmp_path / "m"), "--logits", str(tmp_path / "texts"), "--atol", "1e-5")
    assert same.returncode == 0, same.stderr
    assert same.stdout.count("the same: text") == 2
    # the projection is square: its transpose fits, and only the computation shows it
    held = load_file(source / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    save_file({**held, key: held[key].T.contiguous()}, source / "model.safetensors", {"format": "pt"})
    turned = convert("verify", str(source), str(tmp_path / "m"), "--logits", "abcd")
    assert turned.returncode == 1 and "differs: text 0 ('abcd'" in turned.stderr
