"""The profile of switches: nothing before it is asked for, figures by direction and stage, rates, a trace."""

import io
import json

import pytest

from rl3d.engine.hybrid import SwitchReport
from rl3d.estimate.topology import Topology
from rl3d.reshard.spans import Span, Timeline, totals
from rl3d.utils import enable_switch_profiling, print_switch_report, save_switch_trace, switch_report
from rl3d.utils.profiling import plain_copy_rate, record_switch


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    enable_switch_profiling()
    enable_switch_profiling(False)


def printed():
    out = io.StringIO()
    print_switch_report(out)
    return out.getvalue()


def switch(direction, move, cache, received=0, between=0, **more):
    copy = move / 2
    spans = [Span("move", 10.0, move), Span("copy", 10.0 + move / 4, copy, 1), Span("cache", 10.0 + move, cache)]
    return SwitchReport(
        direction,
        {"move": move, "cache": cache},
        {"copy": copy, "stage": move / 4},
        bytes_received=received,
        received_by_link={"inside": received - between, "between": between},
        spans=spans,
        **more,
    )


def test_nothing_is_recorded_until_asked():
    record_switch(switch("to_generation", 1.0, 0.5), 0, "cpu")
    assert switch_report() == {} and "enable_switch_profiling" in printed()


def test_seconds_bytes_and_rates():
    enable_switch_profiling(inside_gb_per_s=0.16)
    record_switch(switch("to_generation", 0.1, 0.01, 4_000_000, staging_bytes=7, allocated={"KV cache": 100}), 3, "cpu")
    record_switch(switch("to_generation", 0.3, 0.03, 2_000_000, staging_bytes=5, allocated={"KV cache": 300}), 3, "cpu")
    record_switch(switch("to_training", 0.1, 0.001, freed={"KV cache": 5_000_000}), 3, "cpu")
    found = switch_report()["to_generation"]
    assert found["count"] == 2 and found["bytes"]["received"] == found["bytes"]["inside"] == 3_000_000
    assert found["seconds"]["move"] == {"mean": pytest.approx(0.2), "min": 0.1, "max": 0.3}
    assert found["seconds"]["move/copy"]["mean"] == pytest.approx(0.1)
    assert found["seconds"]["total"]["max"] == pytest.approx(0.33)
    assert found["bytes"]["staging"] == 7 and found["allocated"] == {"KV cache": 200}
    assert found["gb_per_s"] == pytest.approx(6e6 / 0.2 / 1e9)  # 6 MB in the 0.2 s of copying
    assert found["link_ratio"] == pytest.approx(0.03 / 0.16)
    text = printed()
    assert "to_generation: 2 switches, rank 3" in text and "to_training: 1 switches" in text
    assert "200.00 ms" in text and "(100.00, 300.00)" in text and "KV cache" in text
    assert "0.2 GB/s link" in text and "0.19 of the rate" in text and "freed: KV cache" in text
    enable_switch_profiling()
    assert switch_report() == {}


def test_what_was_moved_parked_shared_and_verified_is_said():
    enable_switch_profiling(inside_gb_per_s=1.0)
    more = {"source": "partitions", "gathered_bytes": 3_000_000, "arena_bytes": 5_000_000, "alias_bytes": 7_000_000,
            "host_bytes": 11_000_000, "host_copied": 2_000_000, "verified": 27, "transport": "peer",
            "graph_bytes": 13_000_000}  # fmt: skip
    record_switch(switch("to_training", 0.2, 0.0, 1_000_000, **more), 0, "cpu")
    record_switch(switch("to_training", 0.2, 0.0, 1_000_000, **more | {"host_copied": 0}), 0, "cpu")
    sizes = switch_report()["to_training"]["bytes"]
    assert (sizes["gathered"], sizes["arena"], sizes["alias"], sizes["host"]) == (3e6, 5e6, 7e6, 11e6)
    lines = {" ".join(line.split()) for line in printed().replace("│", " ").splitlines()}
    assert "to_training: 2 switches of partitions by peer, rank 0" in lines
    for line in ("gathered from partitions 3.0 MB", "generation weights of their own 5.0 MB",
                 "generation weights that are training weights 7.0 MB", "parked in host memory, most 11.0 MB",
                 "copied to the host 1.0 MB", "kept for captured decode steps 13.0 MB",
                 "parameters verified 27"):  # fmt: skip
        assert line in lines


def test_the_slower_link_counts_and_an_unknown_one_gives_no_ratio():
    enable_switch_profiling(inside_gb_per_s=1.0, between_gb_per_s=0.1)
    record_switch(switch("to_generation", 0.2, 0.0, 30_000_000, between=2_000_000), 0, "cpu")
    assert switch_report()["to_generation"]["link_ratio"] == pytest.approx(0.28)  # 28 MB at 1 GB/s of 0.1 s
    record_switch(switch("to_generation", 0.2, 0.0, 30_000_000, between=8_000_000), 0, "cpu")
    assert switch_report()["to_generation"]["link_ratio"] == pytest.approx(0.1 / 0.2)  # 10 MB at 0.1 GB/s of 0.2 s
    enable_switch_profiling(inside_gb_per_s=1.0)
    record_switch(switch("to_generation", 0.2, 0.0, 30_000_000, between=2_000_000), 0, "cpu")
    assert switch_report()["to_generation"]["link_ratio"] is None


def test_without_a_rate_one_plain_copy_is_the_measure():
    enable_switch_profiling()
    record_switch(switch("to_generation", 0.2, 0.0, 1_000_000, inside="memory"), 0, "cpu")
    found = switch_report()["to_generation"]
    assert found["link_gb_per_s"] == {"inside": plain_copy_rate("cpu")} and 0.05 < plain_copy_rate("cpu") < 10_000
    assert "plain copy" in printed()


def test_what_crosses_devices_is_compared_with_its_link_or_with_nothing():
    enable_switch_profiling()
    for rate in (0.05, None):  # measured by the first
        record_switch(switch("to_generation", 0.2, 0.0, 1_000_000, inside="peer", peer_gb_per_s=rate), 0, "cpu")
    found = switch_report()["to_generation"]
    assert found["link_gb_per_s"] == {"inside": 0.05} and found["link_ratio"] == pytest.approx(0.04 / 0.2)
    assert "0.1 GB/s copy from a peer" in printed()
    for more in ({"inside": "peer"}, {"inside": "messages"}):
        enable_switch_profiling()
        record_switch(switch("to_generation", 0.2, 0.0, 1_000_000, **more), 0, "cpu")
        assert switch_report()["to_generation"]["link_ratio"] is None
        assert "link's rate unknown" in printed() and "of the rate" not in printed()
    enable_switch_profiling(topology=Topology.read("h200-8"), between_gb_per_s=7.0)
    record_switch(switch("to_generation", 0.2, 0.0, 1_000_000, inside="messages"), 0, "cpu")
    assert switch_report()["to_generation"]["link_gb_per_s"] == {"inside": 343, "between": 7.0}


def test_traces_are_chrome_traces_with_one_event_for_each_span(tmp_path):
    enable_switch_profiling()
    record_switch(switch("to_generation", 0.2, 0.1, 1_000_000, freed={"training copy": 8}), 2, "cpu")
    record_switch(SwitchReport("to_training"), 2, "cpu")  # nothing to do: nothing to draw
    place = save_switch_trace(tmp_path / "traces" / "rank{rank}.json")
    assert place.name == "rank2.json"
    name, *events = json.loads(place.read_text())["traceEvents"]
    assert name["ph"] == "M" and name["args"] == {"name": "rank 2 (cpu)"}
    assert [e["name"] for e in events] == ["switch to_generation", "move", "copy", "cache"]
    assert all(e["ph"] == "X" and e["pid"] == 2 for e in events)
    outer = events[0]
    assert outer["dur"] == pytest.approx(0.3e6) and outer["args"]["received"] == 1_000_000
    assert outer["args"]["freed training copy"] == 8
    for event in events[1:]:
        assert outer["ts"] <= event["ts"] + 0.5 and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 0.5


def test_a_timeline_nests_and_survives_exceptions():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("outer"):
        with timeline.span("inner"):
            pass
        with timeline.span("inner"):
            raise KeyError
    with timeline.span("next"):
        pass
    outer, first, second, after = timeline.spans()
    assert [s.depth for s in (outer, first, second, after)] == [0, 1, 1, 0]
    assert outer.start <= first.start <= first.start + first.seconds <= second.start
    assert second.start + second.seconds <= outer.start + outer.seconds <= after.start
    assert totals(timeline.spans(), depth=1) == {"inner": first.seconds + second.seconds}
