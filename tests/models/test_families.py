"""Every family against transformers: greedy tokens, log-probabilities, an update that reaches all of it, and the export."""

import pytest
import torch
import transformers

from rl3d.models import Architecture, UnsupportedModelError
from tests.ranks import run_ranks
from tests.reference import TINY, response_logprobs

ROPE = {"rope_type": "default", "rope_theta": 2e4}
MODELS = {
    "qwen2": transformers.Qwen2Config,
    "qwen2-tied": transformers.Qwen2Config,
    "mistral": transformers.MistralConfig,
    "llama-linear": transformers.LlamaConfig,
    "llama3": transformers.LlamaConfig,
}
SCALED = {
    "llama-linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    # original length 32: the prompts reach far beyond it, where wrong frequencies show
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
PROMPT = 120
LAYOUTS = ("tp2.pp1.zero1", "tp1.pp2.zero1")


def make(name):
    torch.manual_seed(1)
    settings = {k: v for k, v in TINY.items() if k != "head_dim"} | {"tie_word_embeddings": name.endswith("tied")}
    extra = {"sliding_window": None} if name == "mistral" else {}
    config = MODELS[name](**settings, **extra, rope_parameters=SCALED.get(name, ROPE), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # zero when new: a lost bias would go unnoticed
                parameter.normal_(std=0.5)
            elif "norm" not in key:
                parameter.mul_(3.0)
    return model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("families")
    for name in MODELS:
        make(name).save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def facts(root):
    return run_ranks(
        "tests.models.family_checks:main",
        2,
        {"directory": str(root), "families": list(MODELS), "length": PROMPT},
        timeout=200,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_equals_transformers(facts, name, layout):
    found, model = facts[f"{name}-{layout}"], make(name)
    for row, logprobs in zip(found["sequences"], found["logprobs"], strict=True):
        prompt = torch.tensor([row[:PROMPT]])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
                                  eos_token_id=None, pad_token_id=0)[0].tolist()  # fmt: skip
        assert row == expected
        with torch.no_grad():
            right = response_logprobs(model, torch.tensor(row), PROMPT)
        assert torch.tensor(logprobs) == pytest.approx(right, abs=1e-5)
    assert found["against_training"] < 1e-5
    assert found["changed"] == found["parameters"], "an update changes every parameter, biases included"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_gives_back_every_bit(root, facts, name, layout):
    before = make(name).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}-{layout}", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key


def test_sliding_windows_that_matter_are_refused():
    base = transformers.MistralConfig(**{k: v for k, v in TINY.items() if k != "head_dim"}, rope_parameters=ROPE).to_dict()
    assert Architecture.from_hf({**base, "sliding_window": 256}).family == "mistral"
    with pytest.raises(UnsupportedModelError, match="sliding_window = 64"):
        Architecture.from_hf({**base, "sliding_window": 64})
    qwen = transformers.Qwen2Config(rope_parameters=ROPE).to_dict()
    assert Architecture.from_hf(qwen).qkv_bias
    with pytest.raises(UnsupportedModelError, match="use_sliding_window"):
        Architecture.from_hf({**qwen, "use_sliding_window": True})
