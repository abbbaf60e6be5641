"""Shipped shapes against what their authors publish and what transformers builds from them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl3d.models import Architecture, UnsupportedModelError, parameter_specs
from rl3d.models.shapes import find_model, shape, shape_names

# from the index files (total_size / 2 for 16-bit weights) and model cards of the authors
PUBLISHED = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008, "mixtral-8x7b": 46_702_792_704,
}  # fmt: skip


def test_every_shape_is_listed() -> None:
    assert set(shape_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    config = shape(name)
    kind = config.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_and_specifications_agree(name: str) -> None:
    arch = Architecture.from_hf(shape(name), convert_only=True)
    assert arch.num_parameters == PUBLISHED[name]
    specs = parameter_specs(arch, arch.vocab_size)
    assert sum(spec.numel for spec in specs) == PUBLISHED[name]
    assert len({spec.name for spec in specs}) == len(specs)


def test_a_mixture_is_planned_and_not_trained() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'mixtral' is not supported"):
        Architecture.from_hf(shape("mixtral-8x7b"))
    arch = Architecture.from_hf(shape("mixtral-8x7b"), convert_only=True)
    assert arch.experts is not None and (arch.num_experts, arch.experts.active) == (8, 2)
    names = {spec.name: spec for spec in parameter_specs(arch, arch.vocab_size)}
    assert names["decoder.layers.31.mlp.experts.local_experts.7.linear_fc1.weight"].shape == (2 * 14336, 4096)
    assert names["decoder.layers.0.mlp.router.weight"].shape == (8, 4096)


def test_an_unknown_name_gets_the_closest() -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean llama2-7b"):
        shape("lama2-7b")
    with pytest.raises(UnsupportedModelError, match="expected one of llama2-13b, "):
        shape("zzz")


def test_a_model_is_a_directory_a_file_or_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "hidden_size": 8}
    for directory in (tmp_path / "mine", tmp_path / "models" / "prepared"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
    assert find_model("mine") == ("mine", config)
    assert find_model("prepared") == ("prepared", config)
    assert find_model("mine/config.json") == ("config", config)
    assert find_model("Llama2-7B") == ("llama2-7b", shape("llama2-7b"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for text, message in (
        ("empty", "the directory has no config.json"),
        ("list.json", "expected a JSON object"),
        ("broken.json", "not readable as JSON"),
        ("models/none", "no model directory and no config.json at models/none"),
        ("lama2-7b", "did you mean llama2-7b"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            find_model(text)
