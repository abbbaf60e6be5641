"""rl3d bench links: real namespaces, real moves. Slow; where namespaces cannot be made it fails and says what it needs."""

import pytest

from rl3d.bench.links import measure


@pytest.mark.slow
def test_moves_between_nodes_take_the_predicted_time() -> None:
    found = measure(200)
    crossing = [case for case in found["cases"] if case["between_nodes"]]
    assert len(crossing) >= 4
    for case in crossing:
        assert 0.7 < case["measured"] / case["predicted"] < 1.4, case
