"""The profile of switches: nothing before it is asked for, mean, minimum and maximum by direction and stage."""

import io

import pytest

from rl3d.utils import enable_switch_profiling, print_switch_report, switch_report
from rl3d.utils.profiling import record_switch


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    enable_switch_profiling()
    enable_switch_profiling(False)


def printed():
    out = io.StringIO()
    print_switch_report(out)
    return out.getvalue()


def test_nothing_is_recorded_until_asked():
    record_switch("to_generation", {"move": 1.0}, 5)
    assert switch_report() == {} and "enable_switch_profiling" in printed()


def test_mean_minimum_and_maximum():
    enable_switch_profiling()
    record_switch("to_generation", {"move": 0.1, "cache": 0.01}, 4_000_000)
    record_switch("to_generation", {"move": 0.3, "cache": 0.03}, 2_000_000)
    record_switch("to_training", {"cache": 0.001}, 0)
    found = switch_report()["to_generation"]
    assert found["move"] == {"mean": pytest.approx(0.2), "min": 0.1, "max": 0.3, "count": 2}
    assert found["total"]["max"] == pytest.approx(0.33) and found["received"] == 3_000_000
    text = printed()
    assert "to_generation: 2 switches, 3.0 MB received" in text and "to_training: 1 switches" in text
    assert "move         200.00 ms  (100.00, 300.00)" in text and "KV cache" in text
    enable_switch_profiling()
    assert switch_report() == {}
