"""What the converter exports is read by vLLM, which gives transformers' greedy tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from tests.models.zoo import EVERY, make

pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm` installs it for a CPU")
HEADS = {"num_attention_heads": 2, "head_dim": 32}  # vLLM's kernels for a CPU know heads of 32, 64, ...
# vLLM has latent attention for GPUs only, and ties every Gemma
LEFT_OUT = ("deepseek_v3", "deepseek_v3-whole-queries", "gemma-untied")
NEW_TOKENS = 12
PROMPTS = [torch.randint(3, 253, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 100)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name not in LEFT_OUT])
def test_vllm_generates_what_transformers_does(tmp_path: Path, name: str) -> None:
    settings = EVERY[name][1]
    changes = {**HEADS, "num_key_value_heads": min(2, settings.get("num_key_value_heads", 2))}
    if "head_dim" not in settings:
        del changes["head_dim"]
    model = make(name, **changes)
    model.save_pretrained(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", hf=tmp_path / "hf")
    words = [sys.executable, "-m", "tests.io.vllm_tokens", str(tmp_path / "back"), json.dumps(PROMPTS), str(NEW_TOKENS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).resolve().parents[2])
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    for prompt, tokens in zip(PROMPTS, json.loads(lines[0].removeprefix("TOKENS ")), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()
