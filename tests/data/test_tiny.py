import json
import random

import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl3d.data.tiny import make_tiny_model
from rl3d.data.tokenizers import load_tokenizer, pad_id, stop_ids

from .conftest import CONFIG


def test_transformers_loads_the_directory(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) == 79
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    ids = tokenizer("c :", return_tensors="pt").input_ids
    assert ids.shape == (1, 3) and torch.isfinite(model(ids).logits).all()
    modes = {(tiny_model / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1  # not for the owner's eyes only
    assert (tiny_model / "tokenizer.model").is_file()


def test_the_tokenizer_agrees_with_sentencepiece(tiny_model, tokenizer):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tiny_model / "tokenizer.model"))
    source = random.Random(0)
    for _ in range(50):
        text = "a" + "".join(source.choice("abcxyz 0189:") for _ in range(12))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == pieces.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer("a#?b", add_special_tokens=False)["input_ids"] == pieces.encode("a#?b")  # unknown, not dropped


def test_weights_follow_the_seed_and_leave_the_random_state_alone(tiny_model, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    again = make_tiny_model(tmp_path / "again", CONFIG, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    other = make_tiny_model(tmp_path / "other", CONFIG, seed=2)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer.model"):
        assert (again / name).read_bytes() == (tiny_model / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (tiny_model / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]


def test_a_vocabulary_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=64 is smaller than the tokenizer's 79"):
        make_tiny_model(tmp_path / "m", {**CONFIG, "vocab_size": 64})
    assert not list(tmp_path.iterdir())


def test_stop_and_pad_ids_come_from_all_places(tiny_model, tokenizer, tmp_path):
    assert stop_ids(tiny_model, tokenizer) == (2,) and pad_id(tiny_model, tokenizer) == 3
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2], "pad_token_id": -1}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_ids(tmp_path, tokenizer) == (9, 2, 7)
    assert pad_id(tmp_path) == 9 and pad_id(None) == 0 and stop_ids(None) == ()


def test_padding_with_the_end_of_sequence_token_is_fine(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 2
    with pytest.raises(FileNotFoundError, match="no tokenizer there"):
        load_tokenizer(tmp_path / "nowhere")
