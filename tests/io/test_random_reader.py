"""Random weights that no layout has a say in."""

import torch

from rl3d.io import import_hf, write_random_model
from rl3d.models import Architecture, parameter_specs
from tests.reference import TINY

CONFIG = {**TINY, "model_type": "llama", "vocab_size": 601, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}


def _shards(directory, tp, rank, padded=604):
    arch = Architecture.from_hf(directory)
    specs = {s.name: s for s in parameter_specs(arch, padded)}
    out = {name: torch.full(s.local_shape(tp), float("nan")) for name, s in specs.items()}
    import_hf(directory, arch, padded, out, tp, rank)
    return specs, out


def test_shards_are_cut_from_one_model(tmp_path):
    directory = write_random_model(tmp_path / "m", CONFIG, seed=3)
    _, whole = _shards(directory, 1, 0)
    for rank in range(2):
        specs, got = _shards(directory, 2, rank)
        for name, spec in specs.items():
            if spec.dim is None:
                assert torch.equal(got[name], whole[name]), name
            for piece in spec.pieces(2, rank):
                mine = got[name].narrow(spec.dim, piece.local_start, piece.length)
                assert torch.equal(mine, whole[name].narrow(spec.dim, piece.global_start, piece.length)), name


def test_values_are_normal_norms_ones_and_padding_zero(tmp_path):
    _, whole = _shards(write_random_model(tmp_path / "a", CONFIG, seed=3, std=0.5), 1, 0)
    embedding = whole["embedding.word_embeddings.weight"]
    assert embedding[601:].eq(0).all()
    assert abs(float(embedding[:601].std()) - 0.5) < 0.01 and abs(float(embedding[:601].mean())) < 0.01
    assert whole["decoder.layers.0.input_layernorm.weight"].eq(1).all()
    qkv = [whole[f"decoder.layers.{i}.self_attention.linear_qkv.weight"] for i in (0, 1)]
    assert not torch.equal(*qkv), "layers differ"
    _, other = _shards(write_random_model(tmp_path / "b", CONFIG, seed=4, std=0.5), 1, 0)
    assert not torch.equal(other["embedding.word_embeddings.weight"], embedding)
