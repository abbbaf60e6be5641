"""Switches on four ranks: deferred gathers, parked state, arenas, failures half-way, verification."""

import pytest
import torch
import transformers

from tests.engine.switch_checks import BAD, DEFERRED, PARKED
from tests.ranks import run_ranks
from tests.reference import save_llama


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "more layouts"])
def facts(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("switch")
    save_llama(directory / "untied", False), save_llama(directory / "tied", True)
    # a minute on two idle cores
    found = run_ranks(
        "tests.engine.switch_checks:main", 4, {"directory": str(directory), "wide": request.param}, timeout=900
    )
    return {**found, "root": directory}


def test_partitions_are_a_source_and_nothing_differs_from_a_run_that_gathers(facts):
    for (train, gen, dtype), found in zip(DEFERRED, facts["deferred"], strict=True):
        assert found["problems"] == [], (train, gen, dtype)
        assert found["masters"] == [True] * 4
        assert found["pending"] == [[False, True]] * 4, "the gather is left out after the last step only"
        assert found["needed"] == [False] * 4
        for turn in (0, 1):
            for there, back in found[f"reports {turn}"]:
                assert there["source"] == "partitions" and there["gathered_bytes"] == 0
                assert back["source"] in ("partitions", "generation copy")
                assert (back["gathered_bytes"] > 0) == (back["source"] == "partitions")
                assert there["verified"] == back["verified"] > 10


def test_the_training_copy_is_rebuilt_from_the_nearest_holder(facts):
    by_layout = {(train, gen): found for (train, gen, _), found in zip(DEFERRED, facts["deferred"], strict=True)}
    # tp1 generates with the whole model: each rank has all of its training weights at hand
    for _, back in by_layout["tp1.pp1.zero2", "tp1"]["reports 0"]:
        assert back["source"] == "generation copy" and back["bytes_received"] == 0
    # tp4 holds a quarter, the data-parallel partner half of what is needed
    for _, back in by_layout["tp2.pp1.zero1", "tp4"]["reports 0"]:
        assert back["gathered_bytes"] > 0 or back["bytes_received"] > 0


def test_gradients_and_optimiser_state_leave_the_device_and_come_back_bit_for_bit(facts):
    for (train, dtype), found in zip(PARKED, facts["parked"], strict=True):
        assert found["problems"] == [] and found["moments"] == [True] * 4, (train, dtype)
        for rank in found["reports"]:
            for turn, report in enumerate(rank):
                there, back = report["there"], report["back"]
                assert report["away"] == 0
                assert there["freed"]["optimizer state"] == back["allocated"]["optimizer state"] == report["held"] > 0
                assert back["allocated"]["gradients"] == there["freed"]["gradients"]
                assert there["host_bytes"] == report["held"], "buffers as large as what is parked, and no more"
                # nothing was learnt before the third switch: the copy on the host is still good
                assert there["host_copied"] == (0 if turn == 2 else report["held"])
            assert rank[1]["buffers"] == rank[2]["buffers"] != [], "buffers are used again"
    bf16 = facts["parked"][0]
    assert all(r["there"]["freed"]["gradients"] > 0 for rank in bf16["reports"] for r in rank), "fp32 accumulators"
    assert all(r["held"] == 3 * bf16["masters"] for r in bf16["reports"][0][1:]), "fp32 weights and two moments"


def test_generation_weights_never_move_and_take_no_memory_where_they_coincide(facts):
    for found in facts["places"]:
        assert found["addresses"] == [1] * 4 and found["wrong"] == []
        for total, figures in zip(found["total"], found["figures"], strict=True):
            assert figures["arena_bytes"] >= total - figures["alias_bytes"]
            assert figures["arena_bytes"] <= total - figures["alias_bytes"] + 256 * 40, "alignment"
    same, stages, split = facts["places"]
    assert all(f["arena_bytes"] == 0 and f["alias_bytes"] == t for f, t in zip(same["figures"], same["total"], strict=True))
    # one of two stages: about half of the model lies there already
    assert all(0.3 < f["alias_bytes"] / t < 0.7 for f, t in zip(stages["figures"], stages["total"], strict=True))
    assert all(0 < f["alias_bytes"] < t for f, t in zip(split["figures"], split["total"], strict=True))


def test_weights_that_are_no_numbers_are_not_handed_over(facts):
    found = facts["refused"]
    for label in ("nan", "inf"):
        errors = found[label]
        assert any(e.startswith("NonFiniteWeightsError") for e in errors)
        assert all(BAD in e and "rank" in e for e in errors), "every rank names the parameter"
        assert found[f"{label} mode"] == [["training", True, True]] * 4, "and is as it was"
    assert found["usable"] == []


def test_memory_that_does_not_suffice_leaves_the_old_mode_usable(facts):
    found = facts["memory"]
    for errors, culprit in ((found["there"], 2), (found["back"], 1), (found["late"], 3)):
        for rank, error in enumerate(errors):
            if rank == culprit:
                assert error == "OutOfMemoryError: the test's device is full"
            else:
                assert error.startswith("SwitchError") and f"rank {culprit}" in error and "OutOfMemoryError" in error
    assert found["mode"] == ["training"] * 4
    assert found["freed"] == [[0]] * 4, "what the others had allocated for training is given back"
    assert found["same"] and found["usable"] == []


def test_a_value_that_changed_on_its_way_is_found_and_named(facts):
    found = facts["changed"]
    assert all(e.startswith("VerificationError") and BAD in e for e in found["found"])
    assert found["mode"] == ["training"] * 4 and found["usable"] == []


def test_sampled_verification_sees_every_parameter_in_turn(facts):
    found = facts["sampled"]
    assert sum(found["counts"]) == found["parameters"] and max(found["counts"]) < found["parameters"] / 4


def test_some_ranks_generate_and_the_others_hold_no_generation_weights(facts):
    for found in facts["subset"]:
        assert found["problems"] == [] and found["usable"] == []
        first, second, third, learnt, last = found["tokens"]
        assert first == second == third and learnt == last, "who generates changes no token"
        for turn, ranks in enumerate(((0, 1, 2, 3), (1, 3), (0,), (1, 3), (0, 1, 2, 3))):
            for rank, (weights, arena, cache) in enumerate(found[f"held {turn}"]):
                assert (weights > 0) == (cache > 0) == (rank in ranks), (turn, rank)
                assert rank in ranks or arena == 0
        for error, words in zip(found["errors"], ("[]", "[1, 1]", "[2, 9]", "takes all 4 ranks"), strict=True):
            assert all(e.startswith("ValueError") and words in e for e in error), error
    # apart from norms, tp1 of tp2 lies in the arena: it goes and comes
    freed = [f for f, _ in facts["subset"][0]["figures 1"]]
    assert freed[0] > 0 and freed[2] > 0 and freed[1] == freed[3] == 0
    assert facts["subset"][0]["figures 4"][2][1] == freed[2]


def test_calls_on_rank_0_alone_carry_their_arguments_and_different_calls_raise(facts):
    found = facts["calls"]
    assert found["sides"] == [["generation", [1, 2]]] * 4 and found["modes"] == ["training"] * 4
    assert all(e.startswith("ControlError: ranks disagree") and "rank 2" in e for e in found["order"])
    assert all(e.startswith("ControlError: ranks disagree") and "[2, 3]" in e and "[0, 1]" in e for e in found["sets"])
    assert found["mode"] == ["training"] * 4 and found["usable"] == []


def test_a_switch_sets_the_strategy_of_the_cache(facts):
    found = facts["strategy"]
    assert found["kept"]["full"] == found["kept"]["None"] > 0, "full stays while training, and until said otherwise"
    assert found["kept"]["lightweight"] == found["kept"]["adaptive"] == 0
    assert found["changed"] == "lightweight"
    assert all("cache_strategy = 'most'" in e for e in found["error"])


def test_a_grown_vocabulary_is_what_transformers_would_make_of_it(facts):
    """Old rows as they were, new ones their mean, everything else untouched; the model generates and learns with them."""
    for found in facts["grown"]:
        before, after, learnt = (
            transformers.AutoModelForCausalLM.from_pretrained(facts["root"] / name, dtype=torch.float32)
            for name in found["names"]
        )
        assert after.config.vocab_size == found["vocab"] == 262 and found["pad"] == 261
        kept = found["kept"]  # of the optimiser: master weights and moments of the old rows
        assert kept["wrong"] == [] and kept["moving"] > 20 and kept["tensors"] > 30
        assert (facts["root"] / found["names"][1] / "tokens.txt").read_text() == "262"
        old, new = before.state_dict(), after.state_dict()
        assert old.keys() == new.keys()
        for name, tensor in new.items():
            if tensor.shape == old[name].shape:
                assert torch.equal(tensor, old[name]), name
            else:
                assert torch.equal(tensor[:253], old[name]) and tensor.shape[0] == 262
                assert torch.allclose(tensor[253:], old[name].mean(0).expand(9, -1), atol=1e-6)
        for row in torch.tensor(found["greedy"]):
            expected = after.generate(row[None, :3], attention_mask=torch.ones(1, 3), max_new_tokens=6, do_sample=False,
                                      eos_token_id=None, pad_token_id=0)  # fmt: skip
            assert torch.equal(expected[0], row)
        assert any(not torch.equal(a, b) for a, b in zip(after.parameters(), learnt.parameters(), strict=True))
        wrong_mode, sizes = found["errors"]
        assert all("switch_to_training()" in e for e in wrong_mode)
        assert all(e.startswith("ValueError") and "[262, 263, 264, 265]" in e for e in sizes)
