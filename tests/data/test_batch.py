import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl3d.data.batch import FINISH_REASONS, Sample, arrays_to_samples, samples_to_arrays

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def a_sample(draw):
    response = draw(ids)
    failed = draw(st.booleans())
    return Sample(
        uid=draw(st.text(max_size=8)),
        prompt_index=draw(st.integers(0, 2**40)),
        sample_index=draw(st.integers(0, 100)),
        prompt_ids=draw(ids),
        response_ids=response,
        logprobs=[draw(st.floats(-50, 0, width=32)) for _ in response],
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        text=draw(st.text(max_size=8)),
        score=None if failed else draw(st.floats(-1e300, 1e300)),
        failed=failed,
        info=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(a_sample(), max_size=4))
def test_samples_survive_the_way_through_arrays_and_json(samples):
    arrays, sidecar = samples_to_arrays(samples)
    assert all(array.ndim == 1 and array.dtype != np.object_ for array in arrays.values())
    assert arrays_to_samples(arrays, json.loads(json.dumps(sidecar))) == samples


def test_what_cannot_travel_is_named():
    sample = Sample("7-0", 7, 0, [1], [2, 3], [-0.5], "stop")
    with pytest.raises(ValueError, match="sample 7-0: 1 logprobs for 2"):
        samples_to_arrays([sample])
    sample.logprobs = [-0.5, -0.25]
    sample.info = {"x": object()}
    with pytest.raises(TypeError, match="sample 7-0: info"):
        samples_to_arrays([sample])
