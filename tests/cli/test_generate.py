"""``rl3d generate`` as a person types it: two ranks, transformers' engine, and mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl3d.cli import main
from rl3d.config import ConfigError
from rl3d.data.tiny import make_tiny_model
from rl3d.trainer.generate import read_prompts
from tests.cli.test_train import rl3d

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", CONFIG, seed=3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("a :\n\nb : c\nabcd\n", encoding="utf-8")
    return file


def lines(text: str) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda r: (r["index"], r["sample"]))


def test_two_ranks_write_what_transformers_writes(model: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["--prompts", prompts, "--max-new-tokens", 12, "--device", "cpu"]
    out = tmp_path / "made" / "out.jsonl"
    ours = rl3d("generate", model, *options, "--tp", 2, "--temperature", 0, "--out", out, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert f"3 responses -> {out}" in ours.stdout and "Warning" not in ours.stdout + ours.stderr
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    stop = reference.generation_config.eos_token_id
    for record, text in zip(lines(out.read_text()), ["a :", "b : c", "abcd"], strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        right = reference.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert record["tokens"] == right.tolist()
        assert record["text"] == tokenizer.decode(right, skip_special_tokens=True)
        assert record["finish_reason"] == ("stop" if int(right[-1]) == stop else "length")
        logits = reference(torch.cat([ids[0], right])[None]).logits[0, ids.shape[1] - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1).gather(1, right[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record["plain_logprobs"]).double(), expected, atol=1e-5, rtol=0)
    theirs = rl3d("generate", model, *options, "--engine", "hf", "--temperature", 0, cwd=tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    assert [r["tokens"] for r in lines(theirs.stdout)] == [r["tokens"] for r in lines(out.read_text())]


@pytest.mark.parametrize(
    "words,message",
    [
        (["--prompts", "absent.txt"], "absent.txt: no such file"),
        (["--temperature", "-1"], "temperature = -1.0: expected"),
        (["--engine", "hf", "--tp", "2"], "--engine hf with --tp 2"),
    ],
)
def test_mistakes_show_before_anything_starts(
    model: Path, prompts: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), "--prompts", str(prompts), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", "line 2: not JSON"),
        ('{"text": "a"}', "line 2: expected an object with one of prompt, messages, prompt_ids"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 2: expected an object with one of"),
        ('{"prompt_ids": [1, "b"]}', "line 2: prompt_ids is list, expected a list of whole numbers"),
        ('{"prompt": ["a"]}', "line 2: prompt is list, expected a string"),
        ('{"prompt": "a", "stop": "b"}', "line 2: stop is 'b', expected a list of strings"),
        ('{"prompt": "a", "max_new_tokens": 2.5}', "line 2: max_new_tokens is 2.5, expected a whole number"),
    ],
)
def test_a_wrong_line_names_itself(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="p.jsonl, " + message):
        read_prompts(file)


def test_prompts_of_all_kinds(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"prompt_ids": [1, 2]}\n')
    assert [line.prompt for line in read_prompts(file)] == ["a", [{"role": "user", "content": "b"}], [1, 2]]


@pytest.mark.slow
def test_lines_have_lengths_and_stops_of_their_own(model: Path, tmp_path: Path) -> None:
    file, whole = tmp_path / "p.jsonl", tmp_path / "whole.txt"
    whole.write_text("ab : c\n")
    options = ["--temperature", 0, "--max-new-tokens", 12, "--device", "cpu"]
    free = rl3d("generate", model, "--prompts", whole, *options, cwd=tmp_path)
    text = lines(free.stdout)[0]["text"]
    stop = text[3:6]  # a text of several tokens: this tokenizer's are characters
    file.write_text("\n".join(json.dumps(line) for line in (
        {"prompt": "ab : c", "id": "long"}, {"prompt": "ab : c", "id": "short", "max_new_tokens": 4},
        {"prompt": "ab : c", "id": "text", "stop": [stop]},
        {"prompt": "ab : c", "id": "token", "stop_token_ids": [lines(free.stdout)[0]["tokens"][1]]},
    )))  # fmt: skip
    for engine in ("megatron", "hf"):
        done = rl3d("generate", model, "--prompts", file, "--engine", engine, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = {record["id"]: record for record in lines(done.stdout)}
        assert found["long"]["text"] == text and found["short"]["tokens"] == found["long"]["tokens"][:4]
        assert found["text"]["finish_reason"] == "stop" == found["token"]["finish_reason"]
        assert found["text"]["text"] == text[: text.index(stop) + len(stop)] and len(found["token"]["tokens"]) <= 2
