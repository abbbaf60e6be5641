"""Reading shards from Hugging Face files: the right slices, and nothing wrong quietly."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl3d.io import CheckpointError, HFReader, import_hf
from rl3d.models import Architecture, parameter_specs
from tests.reference import hf_llama, save_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), tied=False)


def _shards(directory, tp, rank, padded=256):
    arch = Architecture.from_hf(directory)
    out = {s.name: torch.full(s.local_shape(tp), float("nan")) for s in parameter_specs(arch, padded)}
    import_hf(directory, arch, padded, out, tp, rank)
    return out


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_equal_plain_arithmetic(source, tp):
    model = hf_llama()
    weights = model.state_dict()
    q, k, v = (weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    grouped = torch.cat(
        [torch.cat([q[32 * g : 32 * g + 32], k[16 * g : 16 * g + 16], v[16 * g : 16 * g + 16]]) for g in range(4)]
    )
    gate, up = (weights[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    embedding = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(3, 64)])
    for rank in range(tp):
        got = _shards(source, tp, rank)
        assert torch.equal(got["decoder.layers.1.self_attention.linear_qkv.weight"], grouped.chunk(tp)[rank])
        fc1 = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        assert torch.equal(got["decoder.layers.1.mlp.linear_fc1.weight"], fc1)
        down = weights["model.layers.1.mlp.down_proj.weight"].chunk(tp, 1)[rank]
        assert torch.equal(got["decoder.layers.1.mlp.linear_fc2.weight"], down)
        assert torch.equal(got["embedding.word_embeddings.weight"], embedding.chunk(tp)[rank])
        assert all(t.isfinite().all() for t in got.values()), "something was never written"


def _copy(source, target, edit):
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "missing: model.layers.2.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(3)), "unexpected: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"model.norm.weight: shape \(65,\), expected \(64,\)"),
        (lambda t: t["lm_head.weight"].view(-1)[5:6].fill_(float("nan")), "lm_head.weight holds NaN"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}), "model.norm.weight has dtype"),
    ],
)
def test_damage_is_named(source, tmp_path, edit, message):
    with pytest.raises(CheckpointError, match=message):
        _shards(_copy(source, tmp_path, edit), 1, 0)


def test_a_truncated_file_and_a_missing_shard_are_named(source, tmp_path):
    whole = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        _shards(tmp_path, 1, 0)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors"):
        HFReader(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="safetensors"):
        HFReader(tmp_path)
