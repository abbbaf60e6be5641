"""Models by hub id on several ranks: one download for each node, everybody learns of failures. A hub on loopback."""

import pytest
import torch

from tests.engine.hub_checks import SHORTER_THAN_SLOW, cache
from tests.hub import Hub, commit
from tests.ranks import run_ranks
from tests.reference import hf_llama


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    hf_llama(num_hidden_layers=2).save_pretrained(root / "tiny")
    hf_llama(num_hidden_layers=2).save_pretrained(root / "slow", max_shard_size="60KB")
    hub = Hub()
    hub.repos = {name: {"main": root / directory, "v1": root / directory}
                 for name, directory in (("org/tiny", "tiny"), ("org/slow", "slow"), ("org/stalled", "tiny"))}  # fmt: skip
    hub.delay_of = {"org/slow": 0.7, "org/stalled": 3.5}
    caches = [root / "cache0", root / "cache1"]
    for sha, place in zip("ab", caches):
        cache(place, "org/differs", sha * 40, root / "tiny")
    cache(caches[0], "org/first", "c" * 40, root / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(root / "home"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        out = run_ranks("tests.engine.hub_checks:main", 2, {"caches": list(map(str, caches))}, fresh=True)
    hub.close()
    return out, hub


def test_one_rank_downloads_and_the_other_waits_as_long_as_it_goes_on(seen):
    out, hub = seen
    (first, seconds), (second, _) = out["slow"]
    assert first == second and first.endswith(commit("org/slow", "main"))
    assert seconds > SHORTER_THAN_SLOW
    shards = hub.downloads(".safetensors", "org/slow")
    assert len(shards) > 5 and len(shards) == len(set(shards)), "each file once"
    assert hub.downloads("", "org/tiny").count("model.safetensors") == 1


def test_an_actor_from_an_id_is_the_model(seen):
    out, _ = seen
    assert out["directory"].endswith(commit("org/tiny", "v1"))
    prompt = torch.tensor([[5, 6, 7]])
    expected = hf_llama(num_hidden_layers=2).generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    assert out["greedy"] == expected


def test_every_rank_learns_of_a_failure(seen):
    out, _ = seen
    assert out["missing"][0] == out["missing"][1]
    assert "RepositoryNotFoundError" in out["missing"][0] and "hf download org/none --revision v2" in out["missing"][0]
    assert "has not grown for timeout_s = 1.5 s" in out["stalled"][1] and "hf download org/stalled" in out["stalled"][1]


def test_nodes_must_agree(seen):
    out, _ = seen
    assert out["differ"][0] == out["differ"][1]
    assert "different revisions" in out["differ"][0] and f"org/differs@{'a' * 40}" in out["differ"][0]
    assert out["lacking"][0] == out["lacking"][1]
    assert "hf download org/first" in out["lacking"][0] and "(node 1, rank 1)" in out["lacking"][0]
