"""Every family and every kind of RoPE against transformers: logits, greedy tokens, three AdamW steps, the export."""

from typing import Any

import pytest
import torch
import transformers

from tests.models.zoo import MODELS, make, save
from tests.ranks import run_ranks
from tests.reference import TINY, train_reference

NEW = 16
GENERATE = [(name, tp) for name in MODELS for tp in (1, 2, 4)]
# everything that an update can get wrong in its own way: copies of a weight, more ranks than KV heads, fused tensors
TRAIN = [
    ("llama-mqa", 4, 1), ("llama-mqa", 2, 2), ("llama-linear", 4, 1), ("llama3", 2, 2), ("mistral", 1, 2),
    ("qwen2", 2, 1), ("qwen2-tied", 4, 1), ("qwen3", 2, 1), ("qwen3", 1, 2), ("qwen3-yarn", 4, 1), ("phi3", 2, 2),
    ("olmo2", 2, 2), ("olmo2", 4, 1),
]  # fmt: skip
EVERY = [(name, tp, pp) for name in MODELS for tp, pp in ((2, 1), (1, 2), (4, 1), (2, 2)) if (name, tp, pp) not in TRAIN]


def prompts() -> list[list[int]]:
    """Up to 150 tokens: far beyond the original RoPE lengths of 32, where wrong frequencies show."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, TINY["vocab_size"], (n,), generator=generator).tolist() for n in (150, 1, 97)]


PROMPTS = prompts()


def run(root: Any, generate: Any, train: Any) -> dict[str, Any]:
    for name in {case[0] for case in (*generate, *train)}:
        save(root, name)
    (root / "out").mkdir()
    return run_ranks(
        "tests.models.family_checks:main", 4,
        {"directory": str(root), "out": str(root / "out"), "prompts": PROMPTS, "new_tokens": NEW, "generate": generate,
         "train": train},
        timeout=390,
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def facts(root: Any) -> dict[str, Any]:
    return run(root, GENERATE, TRAIN)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {name: make(name) for name in MODELS}


@torch.no_grad()
def log_softmax(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V] in fp64 from fp32 logits."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


@pytest.mark.parametrize("name", MODELS)
def test_every_logit_equals_transformers(root: Any, facts: Any, references: Any, name: str) -> None:
    right = torch.cat([log_softmax(references[name], p) for p in PROMPTS])
    assert right.max(-1).values.exp().mean() > 0.03, "the model is nearly uniform and would hide faults"
    for tp in (1, 2, 4):
        found = torch.load(root / "out" / f"{name}-{tp}.pt")
        assert set(found) == {"auto", "megatron"}
        for body, logits in found.items():
            error = (torch.log_softmax(logits.double(), -1) - right).abs().max()
            assert error < 1e-5, (tp, body, float(error))
        lean = tp <= references[name].config.num_key_value_heads
        assert facts[f"{name}-{tp}"]["body"] == ("LeanBody" if lean else "MegatronBody")


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers_at_every_tp(facts: Any, references: Any, name: str) -> None:
    model, expected = references[name], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > 3, "the model just repeats itself"
    for tp in (1, 2, 4):
        assert facts[f"{name}-{tp}"]["tokens"] == expected, tp


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    out = {}
    for name in MODELS:
        model = make(name).train()
        out[name] = train_reference(False, model=model)
    return out


def _weights(directory: Any) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def check_training(root: Any, facts: Any, references: Any, trained: Any, case: tuple[str, int, int]) -> None:
    name, tp, pp = case
    label = f"{name}-{tp}.{pp}"
    right = [log_softmax(references[name], p)[:-1].gather(1, torch.tensor(p)[1:, None])[:, 0] for p in PROMPTS]
    assert torch.tensor(facts[label]["logprobs"]) == pytest.approx(torch.cat(right), abs=1e-5)

    start, (expected, norms) = references[name].state_dict(), trained[name]
    before, after = (_weights(root / "out" / label / part) for part in ("before", "after"))
    assert before.keys() == start.keys()
    for key, value in start.items():
        assert torch.equal(before[key], value), key
    for key, value in expected.items():
        assert not torch.equal(value, start[key]), f"{key} has no gradient"
        error = (after[key] - value).abs().max() / value.abs().max()
        assert error < 1e-5, (key, float(error))
    assert facts[label]["norms"] == pytest.approx(norms, rel=1e-5)
    assert facts[label]["copies"] == 0.0


@pytest.mark.parametrize("case", TRAIN, ids=str)
def test_three_steps_equal_transformers_and_adamw(
    root: Any, facts: Any, references: Any, trained: Any, case: tuple[str, int, int]
) -> None:
    check_training(root, facts, references, trained, case)


@pytest.mark.slow
def test_three_steps_of_every_family_in_every_layout(tmp_path: Any, references: Any, trained: Any) -> None:
    found = run(tmp_path, [], EVERY)
    for case in EVERY:
        check_training(tmp_path, found, references, trained, case)
