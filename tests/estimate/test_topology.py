"""Topology files read strictly, and predicted seconds against sums done by hand."""

import json
from pathlib import Path

import pytest

from rl3d.estimate.time import HOST, predict_move
from rl3d.estimate.topology import PRESETS, Topology, TopologyError
from rl3d.layout import Mesh, ParamSpec, ShardLayout
from rl3d.reshard import build_plan

FILE = "gpus_per_node: 2\ninside_gb_per_s: 100\nbetween_gb_per_s: 10\ncopy_gb_per_s: 1000\nmemory_gb: 24\n"


def _links(**changes: float | int) -> Topology:
    values = dict(gpus_per_node=8, inside_gb_per_s=100, between_gb_per_s=10, copy_gb_per_s=1000,
                  inside_latency_us=0, between_latency_us=0)  # fmt: skip
    return Topology.from_mapping(values | changes, "test")


def _plan(tp: int, replicas: int, per_node: int, rows: int, staging: int = 64 << 20):
    """One matrix of ``rows`` x 1000 int8, cut over ``tp`` ranks, wanted whole on each of them."""
    spec = ParamSpec("w", (rows, 1000), 0, layer=0, dtype="int8")
    source = ShardLayout.training(Mesh(tp, 1, replicas), 1)
    target = ShardLayout.replicas(1, [(rank,) for rank in range(tp * replicas)], 1)
    nodes = [rank // per_node for rank in range(tp * replicas)]
    return build_plan([spec], source, target, staging_bytes=staging, nodes=nodes)


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILE)
    found = Topology.read(tmp_path / "mine.yaml")
    assert (found.name, found.gpus_per_node, found.nics_per_node, found.memory_gb) == ("mine", 2, 2, 24)
    (tmp_path / "mine.json").write_text(json.dumps({"name": "x", "gpus_per_node": 4, "inside_gb_per_s": 1.5,
                                                    "between_gb_per_s": 1, "nics_per_node": 1}))  # fmt: skip
    found = Topology.read(tmp_path / "mine.json")
    assert (found.name, found.inside_gb_per_s, found.nics_per_node) == ("x", 1.5, 1)
    assert Topology.read("h100-8") is PRESETS["h100-8"]


@pytest.mark.parametrize(
    "text, message",
    [
        (FILE + "inside_gbs: 3\n", "unknown key 'inside_gbs'; did you mean inside_gb_per_s"),
        ("gpus_per_node: 2\n", "inside_gb_per_s, between_gb_per_s missing"),
        (FILE.replace("100", "-1"), "inside_gb_per_s = -1 must be a number above 0"),
        (FILE.replace("100", "fast"), "inside_gb_per_s = 'fast' must be a number above 0"),
        (FILE.replace("node: 2", "node: 2.5"), "gpus_per_node = 2.5 must be a whole number"),
        (FILE + "nodes: 0\n", "nodes = 0 must be a whole number"),
        ("a: [", "not readable: while parsing"),
        ("- 1\n", "expected keys such as gpus_per_node"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(TopologyError, match=message):
        Topology.read(tmp_path / "t.yaml")


def test_an_unknown_preset_gets_the_closest() -> None:
    with pytest.raises(TopologyError, match="no such file or preset; did you mean h100-8"):
        Topology.read("h10-8")


def test_ranks_must_fill_nodes() -> None:
    links = _links(nodes=2)
    assert links.nodes_of(16) == (0,) * 8 + (1,) * 8
    assert links.nodes_of(6) == (0,) * 6  # one node, in part
    with pytest.raises(TopologyError, match="12 GPUs do not fill nodes of 8; use a multiple of 8"):
        links.nodes_of(12)
    with pytest.raises(TopologyError, match="24 GPUs need 3 nodes of 8, but nodes = 2; use at most 16"):
        links.nodes_of(24)
    assert links.with_gpus_per_node(4).nodes_of(8) == (0,) * 4 + (1,) * 4


def test_inside_a_node() -> None:
    """Two ranks exchange halves of 2 MB: 1 MB each way at 100 GB/s is 10 us, one message of 3 us; staging and the
    local half are copies of 1 MB at 1000 GB/s."""
    found = predict_move(_plan(2, 1, 8, 2000), _links(inside_latency_us=3), peers=False)
    assert found.wire == pytest.approx(13e-6)
    assert found.pack == pytest.approx(2e-6)
    assert found.local == pytest.approx(1e-6)
    assert found.seconds == pytest.approx(16e-6 + HOST)
    assert found.limit == "links inside a node"


def test_buckets_follow_each_other() -> None:
    """A tenth of the staging memory: the same bytes, more messages."""
    one, many = _plan(2, 1, 8, 2000), _plan(2, 1, 8, 2000, staging=100_000)
    links = _links(inside_latency_us=3)
    more = many.certificate.buckets - one.certificate.buckets
    assert more >= 9
    longer, shorter = (predict_move(plan, links, peers=False).wire for plan in (many, one))
    assert longer == pytest.approx(shorter + more * 3e-6)
    assert predict_move(many, links).wire == pytest.approx(predict_move(one, links).wire)  # read at once


def test_memory_of_peers_is_read_without_staging() -> None:
    """As inside a node, by messages: 1 MB each way at 100 GB/s, but no message waits and nothing is staged."""
    found = predict_move(_plan(2, 1, 8, 2000), _links(inside_latency_us=3))
    assert (found.wire, found.pack, found.local) == pytest.approx((10e-6, 0, 1e-6))
    assert found.seconds == pytest.approx(11e-6 + HOST)


def test_between_nodes_the_card_is_the_limit() -> None:
    """Four ranks on two nodes, a quarter of 4 MB each: 2 MB enter each node, once; each of its two ranks takes one and
    then hands it to the other; with its own quarter, the other reads 2 MB at 100 GB/s before and after."""
    plan = _plan(4, 1, 2, 4000)
    own = predict_move(plan, _links(gpus_per_node=2))
    assert plan.certificate.between_nodes == 4_000_000
    assert own.wire == pytest.approx(1e6 / 10e9 + 20e-6)
    messages = predict_move(plan, _links(gpus_per_node=2), peers=False)
    assert messages.wire == pytest.approx(1e6 / 10e9 + 10e-6)  # those inside the node go beside those between
    shared = predict_move(plan, _links(gpus_per_node=2, nics_per_node=1))
    assert shared.wire == pytest.approx(2e6 / 10e9)
    assert shared.limit == "network cards"


def test_latency_can_be_the_limit() -> None:
    found = predict_move(_plan(2, 1, 1, 20), _links(gpus_per_node=1, between_latency_us=500))
    assert found.limit == "latency of messages"
    assert found.wire == pytest.approx(500e-6 + 10_000 / 10e9)


def test_nothing_to_move() -> None:
    found = predict_move(_plan(1, 2, 8, 1000), _links())
    assert (found.wire, found.pack, found.limit) == (0, 0, "nothing travels")
    assert found.local == pytest.approx(1e-6)
