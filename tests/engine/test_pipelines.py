"""Uneven and interleaved pipelines against one process of Hugging Face and torch."""

import pytest
import torch
import transformers

from rl3d.layout import stage_chunks
from tests.ranks import run_ranks
from tests.reference import hf_llama, response_logprobs, save_llama, sequences, train_reference

# (layers, tied, layout) on four ranks; dp follows. Less memory: sequence parallel, every layer computed again
LESS = "/less"
CASES = [
    (5, True, "tp2.pp2.zero1"), (5, False, "tp1.pp4.zero1"),
    (4, True, "tp1.pp2.vpp2.zero1"), (4, False, "tp2.pp2.vpp2.zero1"), (5, True, "tp2.pp2.vpp2.zero1" + LESS),
    (9, True, "tp1.pp4.vpp2.zero1"),
]  # fmt: skip


ACTOR = "tp1.pp2.vpp2.zero1"  # of 5 layers: virtual stages of 2, 1, 1 and 1


def _model(layers, tied):
    return f"{layers}-{'tied' if tied else 'untied'}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pipelines")
    for layers, tied in {case[:2] for case in CASES}:
        save_llama(directory / _model(layers, tied), tied, num_hidden_layers=layers)
    save_llama(directory / "actor" / "tied", True, num_hidden_layers=5)
    return directory


@pytest.fixture(scope="module")
def everything(root):
    less = {"sequence_parallel": True, "recompute": "full"}
    cases = [
        {"name": f"{_model(layers, tied)}-{train.replace('/', '-')}", "model": _model(layers, tied),
         "train": train.removesuffix(LESS), "options": less if train.endswith(LESS) else {}}
        for layers, tied, train in CASES
    ]  # fmt: skip
    arguments = {"directory": str(root), "cases": cases, "actor": ACTOR}
    return run_ranks("tests.engine.pipeline_checks:main", 4, arguments, timeout=240)


@pytest.fixture(scope="module")
def facts(everything):
    return dict(zip(CASES, everything["training"], strict=True))


@pytest.fixture(scope="module")
def reference():
    return {key: train_reference(key[1], num_hidden_layers=key[0]) for key in {case[:2] for case in CASES}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(root, facts, reference, case):
    expected, norms = reference[case[:2]]
    found = facts[case]
    weights = transformers.AutoModelForCausalLM.from_pretrained(root / "out" / found["name"], dtype=torch.float32)
    weights = weights.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        error = (weights[name] - value).abs().max() / value.abs().max()
        assert error < 1e-5, (name, float(error))
    assert found["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_only_passes_give_each_row_its_own_values(facts, case):
    layers, tied, train = case
    model = hf_llama(tied, num_hidden_layers=layers)
    batch = sequences(0)
    shares = facts[case]["logprobs"]
    for dp, rows in shares.items():
        mine = batch[int(dp) :: len(shares)]
        with torch.no_grad():
            expected = torch.cat([response_logprobs(model, s.tokens, s.prompt, 0.7) for s in mine])
        found = torch.cat([torch.tensor(row) for row in rows])
        assert torch.allclose(found, expected, atol=1e-5), train


@pytest.mark.parametrize("case", CASES, ids=str)
def test_megatrons_layer_numbers_are_the_global_ones(facts, case):
    layers, _, train = case
    pp = int(train.split("pp")[1][0])
    vpp = 2 if "vpp2" in train else 1
    expected = stage_chunks(layers, pp, vpp)
    for stage, chunks in facts[case]["numbers"].items():
        assert chunks == [list(chunk) for chunk in expected[int(stage)]]


def test_an_actor_with_interleaved_stages_generates_what_transformers_does(everything):
    found, model = everything["generation"], hf_llama(True, num_hidden_layers=5)
    for row in found["greedy"]:
        prompt, response = [t for t in row[:12] if t != 0], row[12:]
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=len(response),
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert response == expected
    assert 0 < found["against_training"] < 1e-5 and found["log_ratio"] < 1e-5


def test_an_actor_with_interleaved_stages_moves_learns_and_exports(root, everything):
    life = everything["life"]
    assert everything["file"] == [] and life["trips"] == [] and life["learned"] == []
    assert life["changed"] == life["parameters"] > 0
    assert life["metrics"]["actor/kl_loss"] >= 0 and life["metrics"]["actor/grad_norm"] > 0
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "actor" / life["export"], dtype=torch.float32)
    for row, logprobs in zip(life["sequences"], life["logprobs"], strict=True):
        prompt, response = [t for t in row[:12] if t != 0], row[12:]
        with torch.no_grad():
            expected = response_logprobs(model, torch.tensor(prompt + response), len(prompt))
        assert torch.tensor(logprobs) == pytest.approx(expected, abs=1e-4)
