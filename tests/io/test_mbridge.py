"""Tensors against those of mbridge (``pip install --no-deps mbridge==0.15.1``): its names and its own arithmetic, TP 1.

mbridge wants Transformer Engine and a GPU to build a model, and neither to say what a parameter is made of: that is asked
for each parameter here, under Transformer Engine's name.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl3d.io.source import Source
from rl3d.layout import ParamSpec, expert_name, split_expert_name
from tests.models.zoo import save

FAMILIES = ["llama-mqa", "llama-linear", "llama3", "qwen2", "qwen2-tied", "qwen3", "qwen3-yarn", "mixtral", "qwen2_moe",
            "qwen3_moe", "deepseek_v3", "deepseek_v3-whole-queries"]  # fmt: skip
# parameters that mbridge has no name for: it takes every layer of these for a mixture
UNNAMED = {"qwen2_moe": {f"decoder.layers.1.{p}" for p in
                         ("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_what_mbridge_makes_of_the_same_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mbridge", reason="pip install --no-deps mbridge==0.15.1")
    from mbridge.core.safetensor_io import SafeTensorIO  # type: ignore[import-not-found]

    source = Source(save(tmp_path, name))
    bridge = _bridge(source.path, monkeypatch)
    files = SafeTensorIO(str(source.path))
    sparse = {m.spec.layer for m in source.parameters if m.spec.expert is not None}
    latent = any("linear_kv_down_proj" in m.spec.name for m in source.parameters)
    unnamed, different = set(), {}
    for mapped in source.parameters:
        theirs = engine_name(mapped.spec, sparse, latent)
        try:
            parts = bridge._weight_name_mapping_mcore_to_hf(theirs)
        except NotImplementedError:
            unnamed.add(mapped.spec.name)
            continue
        value = bridge._weight_to_mcore_format(theirs, [files.load_one_hf_weight(part) for part in parts])
        if not torch.equal(value, source.read(mapped)):
            different[mapped.spec.name] = f"{theirs}: other values, from {parts}"
    assert not different, (len(source.parameters), different)
    assert unnamed == UNNAMED.get(name, set())
    print(f"{name}: {len(source.parameters) - len(unnamed)} parameters the same")


def _bridge(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """mbridge's converter of the model, made to run beside later versions of its libraries."""
    from mbridge.core.bridge import _MODEL_REGISTRY  # type: ignore[import-not-found]
    from mbridge.core.parallel_states import ParallelStates  # type: ignore[import-not-found]

    config = transformers.AutoConfig.from_pretrained(path)
    config.rope_theta = config.rope_parameters["rope_theta"]  # where it was before transformers 5
    kind = _MODEL_REGISTRY[config.model_type]
    known = {f.name for f in fields(kind.TransformerConfigClass)}
    made = kind.TransformerConfigClass
    monkeypatch.setattr(kind, "TransformerConfigClass", staticmethod(
        lambda **settings: made(**{k: v for k, v in settings.items() if k in known})))  # fmt: skip
    # a tied model changes this mapping of the class: the head of an untied one after it would be the embedding
    monkeypatch.setattr(kind, "_DIRECT_MAPPING", dict(kind._DIRECT_MAPPING))
    return kind(config, dtype=torch.float32, parallel_states=ParallelStates())


def engine_name(spec: ParamSpec, sparse: set[int | None], latent: bool) -> str:
    """What the parameter is called in a model of Transformer Engine's modules, experts grouped."""
    found = split_expert_name(spec.name)
    if found is not None:
        return expert_name(*found, grouped=True)
    name = spec.name
    if latent:
        name = name.replace("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight")
        name = name.replace("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight")
    else:
        name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if spec.layer not in sparse:
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return name
