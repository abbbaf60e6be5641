"""What flows through a step: prompts on the way in, samples on the way back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass
class Prompt:
    """One prompt, tokenised.

    ``uid`` is unique within a run's epoch and batch; ``index`` is the position in the data set. Either ``text`` or
    ``messages`` holds what the row held. ``extra`` are the row's other columns, which reach the reward by name.
    """

    uid: str
    index: int
    text: str | None
    messages: list[dict[str, Any]] | None
    token_ids: list[int]
    answer: Any = None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One response to a prompt.

    ``uid`` is ``f"{prompt.uid}-{sample_index}"``. ``response_ids`` end with the stop token when it stopped there;
    ``logprobs`` has one entry for each of them. ``failed`` means that scoring failed: ``score`` is then ``None`` and the
    sample is left out of the loss.
    """

    uid: str
    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str = ""
    score: float | None = None
    failed: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


def samples_to_arrays(samples: Sequence[Sample]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Flat arrays that collectives can carry, and a sidecar of what is not a number.

    N samples, P prompt tokens and R response tokens altogether. Arrays: ``prompt_lengths``, ``response_lengths`` int32
    [N]; ``prompt_ids`` int32 [P]; ``response_ids`` int32 [R]; ``logprobs`` float32 [R] (exact for float32 values);
    ``prompt_index`` int64, ``sample_index`` int32, ``score`` float64 (NaN for none), ``failed`` bool and ``finish``
    int8 [N]. The sidecar goes through JSON: ``uid``, ``text`` and ``info`` lists.

    Raises ``ValueError`` when logprobs and response differ in length, ``TypeError`` when ``info`` is not JSON.
    """
    for sample in samples:
        if len(sample.logprobs) != len(sample.response_ids):
            raise ValueError(
                f"sample {sample.uid}: {len(sample.logprobs)} logprobs for {len(sample.response_ids)} response tokens; "
                "each sampled token, the stop token included, needs one"
            )
        try:
            json.dumps(sample.info)
        except TypeError as error:
            raise TypeError(f"sample {sample.uid}: info {sample.info!r} cannot be written as JSON: {error}") from None

    def flat(lists: list[list[Any]], dtype: Any) -> np.ndarray:
        return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))

    def column(values: list[Any], dtype: Any) -> np.ndarray:
        return np.array(values, dtype=dtype)

    arrays = {
        "prompt_lengths": column([len(s.prompt_ids) for s in samples], np.int32),
        "response_lengths": column([len(s.response_ids) for s in samples], np.int32),
        "prompt_ids": flat([s.prompt_ids for s in samples], np.int32),
        "response_ids": flat([s.response_ids for s in samples], np.int32),
        "logprobs": flat([s.logprobs for s in samples], np.float32),
        "prompt_index": column([s.prompt_index for s in samples], np.int64),
        "sample_index": column([s.sample_index for s in samples], np.int32),
        "score": column([np.nan if s.score is None else s.score for s in samples], np.float64),
        "failed": column([s.failed for s in samples], np.bool_),
        "finish": column([FINISH_REASONS.index(s.finish_reason) for s in samples], np.int8),
    }
    sidecar = {"uid": [s.uid for s in samples], "text": [s.text for s in samples], "info": [s.info for s in samples]}
    return arrays, sidecar


def arrays_to_samples(arrays: dict[str, np.ndarray], sidecar: dict[str, Any]) -> list[Sample]:
    """The inverse of :func:`samples_to_arrays`."""

    def split(name: str, lengths: str) -> list[list[Any]]:
        ends = np.cumsum(arrays[lengths])[:-1] if len(arrays[lengths]) else np.zeros(0, np.int64)
        return [part.tolist() for part in np.split(arrays[name], ends)]

    if not len(arrays["prompt_lengths"]):
        return []
    columns = zip(
        sidecar["uid"],
        arrays["prompt_index"].tolist(),
        arrays["sample_index"].tolist(),
        split("prompt_ids", "prompt_lengths"),
        split("response_ids", "response_lengths"),
        split("logprobs", "response_lengths"),
        [FINISH_REASONS[code] for code in arrays["finish"].tolist()],
        sidecar["text"],
        [None if np.isnan(score) else float(score) for score in arrays["score"]],
        arrays["failed"].tolist(),
        sidecar["info"],
        strict=True,
    )
    return [Sample(*values) for values in columns]
