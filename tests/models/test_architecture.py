"""Reading configurations strictly, and rules that cover both sides exactly once."""

import pytest
import transformers

from rl3d.models import Architecture, UnsupportedModelError, hf_shapes, mapped_parameters, parameter_specs
from tests.reference import TINY, hf_llama

LLAMA = {**TINY, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}


def test_theta_comes_from_rope_parameters_or_the_top_and_is_never_guessed():
    assert Architecture.from_hf(LLAMA).rope_theta == 5e4
    old = {k: v for k, v in LLAMA.items() if k != "rope_parameters"}
    assert Architecture.from_hf({**old, "rope_theta": 1e5}).rope_theta == 1e5
    with pytest.raises(UnsupportedModelError, match="rope_theta"):
        Architecture.from_hf(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"some_new_scale": 2.0}, "some_new_scale"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quanti"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Architecture.from_hf({**LLAMA, **change})


def test_a_real_transformers_configuration_is_read_whole():
    arch = Architecture.from_hf(transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
    assert (arch.head_dim, arch.num_heads, arch.num_kv_heads, arch.qkv_rows) == (16, 8, 4, 256)


def test_head_dim_is_not_hidden_over_heads():
    """64 query heads of 128 over hidden 5120: (64 + 16) * 128 rows (TensorRT-LLM issue 5912)."""
    arch = Architecture.from_hf(
        {**LLAMA, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    )
    assert arch.qkv_rows == 10240


@pytest.mark.parametrize("tied", [False, True])
def test_rules_cover_the_checkpoint_exactly(tied):
    model = hf_llama(tied)
    arch = Architecture.from_hf(model.config)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert hf_shapes(arch) == expected
    assert arch.num_parameters == sum(p.numel() for p in model.parameters())


def test_padding_serves_every_tensor_parallel_size():
    arch = Architecture.from_hf(LLAMA)
    assert arch.padded_vocab(2, 3) == 258
    specs = {s.name: s for s in parameter_specs(arch, 258)}
    embedding = specs["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 258 and embedding.valid_rows == 253
    assert embedding.local_shape(3)[0] == 86


def test_gate_and_up_are_cut_per_block():
    """Megatron-LM issue 360: gate rows 0..3, up rows 10..13 at TP = 2 -> [0, 1, 10, 11] and [2, 3, 12, 13]."""
    arch = Architecture.from_hf({**LLAMA, "intermediate_size": 4})
    spec = next(m.spec for m in mapped_parameters(arch, 253) if m.spec.name.endswith("linear_fc1.weight"))
    rows = [0, 1, 2, 3, 10, 11, 12, 13]
    for index, expected in ((0, [0, 1, 10, 11]), (1, [2, 3, 12, 13])):
        got = [rows[p.global_start + i] for p in spec.pieces(2, index) for i in range(p.length)]
        assert got == expected


def test_tensor_parallel_beyond_kv_heads_cuts_raw_rows():
    """4 query heads, 2 KV groups, TP = 4: ranks hold Q0 Q1 | K0 V0 | Q2 Q3 | K1 V1."""
    arch = Architecture.from_hf({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1})
    mapped = next(m for m in mapped_parameters(arch, 253) if "linear_qkv" in m.spec.name)
    heads = {}
    for s in mapped.segments:
        for i in range(s.length):
            heads[s.start + i] = f"{s.hf_name.split('.')[-2][0].upper()}{s.hf_start + i}"
    order = [heads[i] for i in range(8)]
    pieces = [mapped.spec.pieces(4, r)[0] for r in range(4)]
    assert [order[p.global_start : p.global_start + p.length] for p in pieces] == [
        ["Q0", "Q1"], ["K0", "V0"], ["Q2", "Q3"], ["K1", "V1"],
    ]  # fmt: skip
