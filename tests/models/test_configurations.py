"""What each family's configuration says: read as transformers reads it, and refused where the computation would differ."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rl3d.config import ConfigError, RunConfig
from rl3d.models import FAMILIES, Architecture, UnsupportedModelError, hf_shapes
from rl3d.models.support import refuse_unsupported
from tests.models.zoo import MODELS, YARN, make

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
    kind, settings = MODELS[name]
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
    name = next(name for name in MODELS if name.split("-")[0] in (family, f"{family}3"))
    for field in OPTIONAL:
        config = {k: v for k, v in base(name).items() if k != field}
        if family == "mistral":
            config["sliding_window"] = None
        whole = transformers.AutoConfig.for_model(**{**config, "rope_parameters": dict(ROPE)})
        expected = Architecture.from_hf(whole)
        assert Architecture.from_hf({**config, "rope_parameters": ROPE}) == expected, field


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
