"""rl3d bench switch: four gloo ranks, every kind of source, every other way between the layouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl3d.bench import BenchError
from rl3d.bench.switch import pair_up, shape_values
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 250, "rope_theta": 1e4,
}  # fmt: skip
TRAIN = ["tp2.pp2.zero1", "tp2.zero3", "tp2.zero1:partitions"]


slow = pytest.mark.slow  # every other way between the layouts beside ours


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "small.json"
    file.write_text(json.dumps(SHAPE))
    words = ["bench", "switch", str(file), "--train", *TRAIN, "--gen", "tp4", "--ranks", "4", "--device", "cpu"]
    words += ["--repeats", "1", "--shape", "num_hidden_layers=2", "--json"]
    done = subprocess.run([sys.executable, "-m", "rl3d", *words], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@slow
def test_every_way_brings_every_parameter(found):
    assert [case["train"] for case in found["cases"]] == TRAIN
    for case in found["cases"]:
        assert case["changed"] == [] and case["transport"] == "peer"
        assert {"ours", "back", "copy", "peer_copy", "all_gather", "megatron_core"} == case["seconds"].keys()
        assert all(0 < seconds < 20 for seconds in case["seconds"].values())
        assert case["stages"].keys() == {"local", "copy", "wait"}, "nothing goes through staging memory"


@slow
def test_no_rank_receives_more_than_the_bound_and_nothing_is_staged(found):
    for case in found["cases"]:
        assert 0 < case["received_max"] == case["bound"]
        assert case["staging_bytes"] == 0 <= case["extra_bytes"]


@slow
def test_a_pair_that_memory_cannot_hold_is_a_row_that_says_so_and_the_others_run(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SHAPE))
    words = ["bench", "switch", str(tmp_path / "small.json"), "--train", "tp1.zero1", "tp2.pp2.zero1", "--gen", "tp4"]
    words += ["--ranks", "4", "--device", "cpu", "--repeats", "1", "--only-ours", "--memory-limit-gb"]

    def bench(limit):  # 0.85 MB of weights in all, four copies of them with tp1
        command = [sys.executable, "-m", "rl3d", *words, limit]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=90)

    done = bench("0.0016")
    assert done.returncode == 0, done.stderr
    *_, refused, ran = done.stdout.splitlines()
    assert "not run: " in refused and "MB wanted by the ranks on one device, 1.6 MB free" in refused
    assert ran.startswith("| tp2.pp2.zero1 | tp4 | peer |") and ran.endswith("| equal |")
    nothing = bench("0.0001")
    assert nothing.returncode == 1 and nothing.stdout.count("not run: ") == 2


def test_the_plain_peer_copy_reads_each_peer_for_its_part():
    """Halves of 1,024 bytes of each of two ranks; where one of them cannot map the other, nobody has a figure."""
    answer = run_ranks("tests.bench.peer_checks:main", 2)
    assert answer["wanted"] == [{"1": 1024}, 1024]
    assert answer["found"] == [[[0, 1024, 1024], [0, 0, 1024, 1024], True]] * 2


def test_layouts_and_shapes_that_do_not_fit_are_named():
    assert pair_up(["tp2", "tp4"], ["tp1"]) == [("tp2", "tp1"), ("tp4", "tp1")]
    with pytest.raises(BenchError, match="2 layouts for --train and 3 for --gen"):
        pair_up(["tp2"] * 2, ["tp1"] * 3)
    assert shape_values(["num_hidden_layers=4"]) == {"num_hidden_layers": 4}
    with pytest.raises(BenchError, match="expected KEY=VALUE"):
        shape_values(["num_hidden_layers"])
