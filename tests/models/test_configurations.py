"""What each family's configuration says: read as transformers reads it, and refused where the computation would differ."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rl3d.config import ConfigError, RunConfig
from rl3d.models import FAMILIES, Architecture, NotTrainedError, UnsupportedModelError, hf_shapes
from rl3d.models.support import refuse_unsupported
from tests.models.zoo import CONVERTED, MODELS, YARN, make, save

ROPE = {"rope_type": "default", "rope_theta": 2e4}
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
# published config.json files, shortened to what the computation reads
PHI_3_MINI = {
    "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "attention_bias": False,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
PHI_4 = {**PHI_3_MINI, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_hidden_layers": 40,
         "num_key_value_heads": 10, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
         "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMO2_7B = {
    "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip


def base(name: str) -> dict[str, Any]:
    kind, settings = {**MODELS, **CONVERTED}[name]
    return kind(**{"rope_parameters": dict(ROPE), **settings}).to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_rules_cover_the_checkpoint_exactly(name: str) -> None:
    model = make(name)
    arch = Architecture.from_hf(model.config)
    assert hf_shapes(arch) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert arch.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(PHI_4, 14_659_507_200), (QWEN3_06B, 596_049_920), (OLMO2_7B, 7_298_617_344)],  # as their model cards count
)
def test_published_configurations_give_the_published_sizes(config: dict[str, Any], parameters: int) -> None:
    arch = Architecture.from_hf(config)
    assert arch.num_parameters == parameters
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert hf_shapes(arch) == {n: tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_mean_what_transformers_takes_them_for(family: str) -> None:
    name = next(name for name in {**MODELS, **CONVERTED} if name.split("-")[0] in (family, f"{family}3"))
    for field in OPTIONAL:
        config = {k: v for k, v in base(name).items() if k != field}
        if family in ("mistral", "mixtral"):
            config["sliding_window"] = None
        if family == "deepseek_v3" and field == "num_key_value_heads":
            config["num_attention_heads"] = 128  # transformers' default is a number
        rope = base(name)["rope_parameters"] if family == "gemma3_text" else ROPE
        whole = transformers.AutoConfig.for_model(**{**config, "rope_parameters": dict(rope)})
        expected = Architecture.from_hf(whole, convert_only=True)
        assert Architecture.from_hf({**config, "rope_parameters": rope}, convert_only=True) == expected, field


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-mqa", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "longest sequence"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "two sets of frequencies"),
        ("phi3", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "su"}}, "'longrope'"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'longrope'"),
        ("llama-linear", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75"),
        ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, "partial_rotary_factor = 0.75"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"rope_parameters": {**YARN, "beta": 3}}, "may have .*beta_fast"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ("qwen2", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 1e4}}},
         "differ between kinds of layers"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("llama-mqa", {"original_max_position_embeddings": 64}, "original_max_position_embeddings"),
        ("llama-mqa", {"hidden_size": None}, "does not say hidden_size"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Architecture.from_hf({**base(name), **change})


def test_a_window_that_no_sequence_outgrows_is_full_attention() -> None:
    assert Architecture.from_hf({**base("mistral"), "sliding_window": 2048}).max_positions == 2048
    left_out = {k: v for k, v in base("mistral").items() if k != "sliding_window"}  # means 4096 for mistral
    assert Architecture.from_hf({**left_out, "max_position_embeddings": 4096}).max_positions == 4096
    assert Architecture.from_hf({**left_out, "max_position_embeddings": 8192}).max_positions == 4096
    assert Architecture.from_hf(PHI_3_MINI).max_positions == 2047
    assert (
        Architecture.from_hf({**base("qwen2"), "sliding_window": 64}).max_positions
        == base("qwen2")["max_position_embeddings"]
    )


def test_a_run_that_outgrows_the_window_is_refused_before_it_starts() -> None:
    sizes = {
        "data": {"train": "tiny:copy", "max_prompt_tokens": 1024},
        "reward": {"function": "reasoning_gym"},
        "rollout": {"max_new_tokens": 1023},
    }
    fits = RunConfig.model_validate({"model": {"path": "phi", "max_sequence_length": 2047}, **sizes})
    refuse_unsupported(fits, PHI_3_MINI)
    too_long = RunConfig.model_validate({"model": {"path": "phi", "max_sequence_length": 2048}, **sizes})
    with pytest.raises(ConfigError, match="model.max_sequence_length.*sliding_window = 2047"):
        refuse_unsupported(too_long, PHI_3_MINI)


def test_kinds_of_layers_with_one_rotary_embedding_are_read() -> None:
    """transformers 5 may nest rope_parameters by kind of layer; the top-level theta of older files is not lost."""
    nested = {**base("qwen2"), "rope_parameters": {"full_attention": ROPE, "sliding_attention": dict(ROPE)}}
    assert Architecture.from_hf(nested).rope_theta == 2e4
    old = {**base("qwen3"), "rope_parameters": None, "rope_theta": 3e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    arch = Architecture.from_hf(old)
    assert arch.rope_theta == 3e5
    assert dict(arch.rope_scaling) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Olmo2RMSNorm])
def test_norms_round_where_transformers_rounds(kind: Any) -> None:
    """qwen3 multiplies by the weight after rounding to bf16, olmo2 before."""
    from types import SimpleNamespace

    from rl3d.models.layers import ProjectionNorm, RMSNorm

    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    x, weight = torch.randn(40, 64).bfloat16() * 3, torch.randn(64).bfloat16()
    right = kind(64, 1e-5).bfloat16()
    late = kind is Olmo2RMSNorm
    norms = [RMSNorm(config, 64, 1e-5, late_rounding=late)]
    if late:
        norms.append(ProjectionNorm(config, 16, 1e-5, heads=4, group=None))
    with torch.no_grad():
        right.weight.copy_(weight)
        for norm in norms:
            norm.weight.copy_(weight)
            shaped = x.view(40, 4, 16) if isinstance(norm, ProjectionNorm) else x
            assert torch.equal(norm(shaped).view_as(x), right(x))


@pytest.mark.parametrize("name", CONVERTED)
def test_rules_cover_the_files_of_converted_families_exactly(tmp_path: Path, name: str) -> None:
    """Compared with the files that transformers writes, which are named as the hub's, experts one by one."""
    directory = save(tmp_path, name)
    written = {}
    for file in directory.glob("*.safetensors"):
        written |= {key: tuple(value.shape) for key, value in load_file(file).items()}
    arch = Architecture.from_hf(directory, convert_only=True)
    assert hf_shapes(arch) == written
    assert arch.num_parameters == sum(math.prod(shape) for shape in written.values())


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_families_are_not_trained_and_say_why(name: str) -> None:
    with pytest.raises(
        NotTrainedError, match="not supported for training: .*not computed by rl3d's engines.*trained are llama"
    ):
        Architecture.from_hf(base(name))
    assert Architecture.from_hf(base(name), convert_only=True).not_trained


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ("gemma3_text", {"rope_parameters": ROPE}, "do not say whose they are"),
        ("gemma2", {"layer_types": ["full_attention"]}, "names 1 layers"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = False"),
        ("mixtral", {"expert_bias": 1.0}, "expert_bias = 1.0"),
        ("mistral", {"new_scale": 2.0}, "new_scale = 2.0"),
    ],
)
def test_a_field_that_no_rule_consumed_is_refused_in_conversions_too(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Architecture.from_hf({**base(name), **change}, convert_only=True)


def test_a_rotary_embedding_that_is_not_computed_is_still_converted() -> None:
    longrope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    config = {**PHI_3_MINI, "max_position_embeddings": 131072, "rope_scaling": longrope, "partial_rotary_factor": 1.0}
    arch = Architecture.from_hf(config, convert_only=True)
    assert "two sets of frequencies" in arch.not_trained[0]
    assert arch != Architecture.from_hf(
        {**config, "rope_scaling": {**longrope, "short_factor": [1.0, 3.0]}}, convert_only=True
    )


def test_what_gemma_and_deepseek_say_is_read() -> None:
    """Against transformers' modules, which read the same configurations."""
    gemma = Architecture.from_hf(base("gemma3_text"), convert_only=True)
    model = make("gemma3_text").model
    assert gemma.windows == tuple(layer.self_attn.sliding_window or 0 for layer in model.layers) == (16, 0, 16, 0)
    assert gemma.attention_scale == model.layers[0].self_attn.scaling
    assert gemma.embedding_scale == pytest.approx(float(model.embed_tokens.embed_scale))
    assert (gemma.rope_theta, gemma.local_rope) == (3e4, (2e4, ()))
    second = make("gemma2")
    assert Architecture.from_hf(second.config, convert_only=True).attention_softcap == 5.0
    old = {**base("gemma3_text"), "rope_parameters": None, "layer_types": None, "rope_local_base_freq": 5e3,
           "rope_theta": 7e5, "sliding_window_pattern": 3}  # fmt: skip
    arch, right = Architecture.from_hf(old, convert_only=True), transformers.Gemma3TextConfig(**old)
    assert [kind == "sliding_attention" for kind in right.layer_types] == [w > 0 for w in arch.windows]
    assert right.rope_parameters["full_attention"]["rope_theta"] == arch.rope_theta == 7e5
    assert arch.local_rope is not None
    assert right.rope_parameters["sliding_attention"]["rope_theta"] == arch.local_rope[0] == 5e3
    deepseek = Architecture.from_hf(base("deepseek_v3"), convert_only=True)
    assert deepseek.experts is not None
    sparse = tuple(hasattr(layer.mlp, "experts") for layer in make("deepseek_v3").model.layers)
    assert deepseek.experts.sparse == sparse == (False, True, True, True)
