"""The actor on four ranks against Hugging Face: generation, log-probabilities, switches, updates, export."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rl3d.io.compare import changes
from rl3d.io.convert import megatron_to_hf
from rl3d.io.source import Source
from tests.ranks import run_ranks
from tests.reference import hf_llama, pair_tokenizer, response_logprobs, save_llama, sequences

PROMPT_COLUMNS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("actor")
    for tied in (False, True):
        save_llama(directory / ("tied" if tied else "untied"), tied)
    return directory


@pytest.fixture(scope="module")
def facts(root):
    return run_ranks("tests.engine.actor_checks:main", 4, {"directory": str(root)}, timeout=240)


def _rows(sequences):
    """(prompt without padding, response) of each row."""
    for row in sequences:
        yield [t for t in row[:PROMPT_COLUMNS] if t != 0], row[PROMPT_COLUMNS:]


def test_greedy_equals_transformers_in_every_generation_layout(facts):
    for found in facts["generations"]:
        model = hf_llama(found["tied"])
        for prompt, response in _rows(found["greedy"]):
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=len(response),
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :].tolist()  # fmt: skip
            assert response == expected, (found["tied"], found["gen"])


def test_stop_texts_end_what_transformers_ends(facts):
    tokenizer = pair_tokenizer()
    for found in facts["generations"]:
        model, shorter = hf_llama(found["tied"]), 0
        for (prompt, response), (_, whole) in zip(_rows(found["stopped"]), _rows(found["greedy"]), strict=True):
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=len(whole),
                do_sample=False, eos_token_id=None, pad_token_id=0, stop_strings=found["stop"], tokenizer=tokenizer,
            )[0, len(prompt) :].tolist()  # fmt: skip
            assert response == expected + [0] * (len(response) - len(expected)), (found["stop"], found["gen"])
            shorter += len(expected) < len(whole)
        assert shorter, found["stop"]


def test_sampled_tokens_do_not_depend_on_the_generation_layout(facts):
    for tied in (False, True):
        one, *others = (f["sampled"] for f in facts["generations"] if f["tied"] == tied)
        assert others and all(other == one for other in others)
        assert len({tuple(r) for _, r in _rows(one)}) == len(one), "different prompts drew the same noise"


def test_rollout_logprobs_equal_transformers_and_the_training_engine(facts):
    for found in facts["generations"]:
        model = hf_llama(found["tied"])
        for (prompt, response), logprobs in zip(_rows(found["sampled"]), found["logprobs"], strict=True):
            with torch.no_grad():
                expected = response_logprobs(model, torch.tensor(prompt + response), len(prompt), temperature=0.8)
            assert torch.tensor(logprobs) == pytest.approx(expected, abs=1e-5)
        assert 0 < found["against_training"] < 1e-5
        assert found["log_ratio"] < 1e-5


def test_round_trips_change_no_fingerprint(facts):
    for life in facts["life"]:
        assert life["trips"] == [], life["copy"]


def test_ranks_read_each_others_weights_unless_these_leave_the_device(facts):
    assert [life["transport"] for life in facts["life"][-3:]] == [["peer"], ["peer"], ["collective"]]


def test_a_resumed_run_goes_on_bit_for_bit(facts):
    assert facts["resumed"] == [[], [], []]


def test_a_run_goes_on_in_any_other_layout(facts):
    check_carried(facts["carried"], 2)


@pytest.mark.slow
def test_a_run_goes_on_in_every_other_layout(root):
    check_carried(run_ranks("tests.engine.carry_checks:every", 4, {"directory": str(root)}, timeout=400), 6)


def check_carried(moves, count):
    """Weights are carried bit for bit; the moments with them, or the next step would go elsewhere."""
    assert len(moves) == count
    for found in moves:
        assert found["equal"] == [], found["move"]
        rounding = 2**-7 / 1e-3  # of bf16 weights up to 2, in steps
        assert found["distance"] < (rounding if "bfloat16" in found["move"] else 2e-3), found["move"]
        lost, foreign = found["errors"]
        assert "are in none of the 4 parts" in lost and "it is of another model: another" in foreign


def test_an_update_reaches_the_generation_layout(facts):
    for life in facts["life"]:
        assert life["changed"] == life["parameters"], "an update moves every parameter"
        assert life["learned"] == [], "generation and training hold the same weights after the update"
        assert life["metrics"]["actor/kl_loss"] >= 0
        assert life["metrics"]["actor/grad_norm"] > 0
        assert life["metrics"]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)


def test_a_switch_on_rank_0_alone_followed_by_a_barrier(facts):
    assert {life["mode"] for life in facts["life"]} == {"training"}


def test_calls_in_the_wrong_mode_name_the_switch(facts):
    for life in facts["life"]:
        assert "switch_to_generation()" in life["errors"]["generate"]
        assert "switch_to_training()" in life["errors"]["update"]
        assert "response_mask" in life["errors"]["foreign"]


def test_the_export_computes_what_the_trained_actor_computes(root, facts):
    for life in facts["life"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(root / life["export"], dtype=torch.float32)
        for (prompt, response), logprobs in zip(_rows(life["sequences"]), life["logprobs"], strict=True):
            with torch.no_grad():
                expected = response_logprobs(model, torch.tensor(prompt + response), len(prompt))
            assert torch.tensor(logprobs) == pytest.approx(expected, abs=1e-4)


def test_the_megatron_export_holds_the_same_weights_shard_by_shard(root, facts, tmp_path):
    for life in facts["life"]:
        place, layout = root / f"megatron-{life['export']}", life["export"].split("-")[-1]
        megatron_to_hf(place, tmp_path / life["export"])
        found, right = (
            {k: t for file in directory.glob("*.safetensors") for k, t in load_file(file).items()}
            for directory in (tmp_path / life["export"], root / life["export"])
        )
        assert found.keys() == right.keys() and all(torch.equal(found[k], right[k]) for k in right)
        assert changes(Source(place)) == []
        tp, pp = (int(word[2:]) for word in layout.split(".")[:2])
        assert sorted(p.name for p in place.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(tp * pp)]
        whole = sum(p.stat().st_size for p in place.glob("*.distcp"))
        assert max(p.stat().st_size for p in place.glob("*.distcp")) < 2 * whole / (tp * pp)


def test_the_file_and_the_layouts_have_the_same_fingerprints(facts):
    assert facts["file"] == []


def test_switches_are_profiled(facts):
    for life in facts["life"]:
        there, back = life["profile"]["to_generation"], life["profile"]["to_training"]
        assert there["count"] == back["count"] == 3, "calls with nothing to do are not switches"
        # ranks laid out for it, tp2.dp2 holds in place all that tp4 wants
        moves = "tp2.pp1.zero2" not in life["export"]
        assert (there["bytes"]["received"] > 0) == moves and there["seconds"]["move"]["min"] > 0
        assert there["bytes"]["inside"] == there["bytes"]["received"] and there["bytes"]["between"] == 0
        ways = {"peer": "memory", "collective": "messages"}  # whose link has no rate that anybody gave
        assert there["inside"] == (ways[there["transport"]] if moves else "")
        assert (there["link_ratio"] is not None) == (there["inside"] == "memory")
        assert there["allocated"]["KV cache"] == back["freed"]["KV cache"]
        assert (back["bytes"]["received"] > 0) == (life["copy"] == "drop") == ("training copy" in there["freed"])


def test_a_trace_of_the_switches_nests(facts):
    """As chrome://tracing reads it: complete events of one thread either follow or contain each other."""
    for life in facts["life"]:
        events = [e for e in life["trace"]["traceEvents"] if e["ph"] == "X"]
        assert [e["name"] for e in events].count("switch to_generation") == 3
        assert {"plan", "move", "local", "cache"} <= {e["name"] for e in events}
        open_until: list[tuple[str, float]] = []
        parents = {}
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1][1] <= event["ts"] + 0.01:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1][1] + 0.5, (event, open_until)
            parents[event["name"]] = open_until[-1][0] if open_until else None
            open_until.append((event["name"], end))
        assert parents["switch to_generation"] is None and parents["local"] == "move"
        assert parents["move"].startswith("switch ") and parents["cache"].startswith("switch ")


def _expected_update(mode, count=8):
    """The same update by transformers and autograd: loss and gradient norm, verl's aggregation over seven valid samples."""
    model = hf_llama(tied=True)
    terms, tokens = [], 0
    for i, s in enumerate(sequences(0)[:count]):
        if i == 3:
            continue
        logp = torch.log_softmax(model(s.tokens[None]).logits[0, s.prompt - 1 : -1] / 0.7, -1)
        chosen = logp.gather(1, s.tokens[s.prompt :, None])[:, 0]
        ratio = (chosen - chosen.detach()).exp()
        entropy = -(logp.exp() * logp).sum(-1)
        per_token = -((-1.0) ** i * (i + 1)) * ratio - 0.01 * entropy
        terms.append(per_token)
        tokens += len(per_token)
    total = sum(t.sum() for t in terms) / tokens if mode == "token-mean" else sum(t.mean() for t in terms) / len(terms)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return total.item(), norm.item()


def test_ranks_without_samples_take_part(facts):
    loss, norm = _expected_update("token-mean", count=2)
    *exact, rounded = facts["few"]
    for found in exact:
        assert found["actor/total_loss"] == pytest.approx(loss, rel=1e-5), found["train"]
        assert found["actor/grad_norm"] == pytest.approx(norm, rel=1e-5), found["train"]
    assert rounded["actor/grad_norm"] == pytest.approx(norm, rel=5e-2)
