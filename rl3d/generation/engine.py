"""The interface that every generation engine offers: what is asked of it and what it returns."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_INT64 = 1 << 63


class GenerationError(ValueError):
    """A request that can never be served; the message names the request, the value and the limit."""


class StaleWeightsError(RuntimeError):
    """The generation weights were never loaded, or are older than the trained ones."""


def check_weights(version: int | None, expected: int | None) -> None:
    """Raise StaleWeightsError unless the weights of ``version`` are those ``expected`` (``None``: any)."""
    if version is None:
        raise StaleWeightsError(
            "generation weights were never loaded (weights_version is None); load them and set weights_version"
        )
    if expected is not None and version != expected:
        raise StaleWeightsError(
            f"generation weights have version {version}, expected {expected}; move the trained weights first "
            f"(switch_to_generation)"
        )


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of a request.

    Attributes:
        max_new_tokens: most tokens to draw; 0 gives an empty result.
        temperature: logits are divided by it; 0 is greedy, ties going to the lowest id.
        top_p: draw from the smallest set of most probable tokens that holds this much probability; 1 is no filter.
        top_k: draw from the k most probable tokens; 0 is no filter. Applied before ``top_p``, which sees what top-k
            left, renormalised (the order of Hugging Face and vLLM).
        stop_token_ids: drawing one of these ends the sequence; the token is part of the result.
        n: samples of the prompt; sample i draws the noise of ``(step, prompt_id, sample_id + i)``.
        seed: the run's seed.
        min_p: draw from tokens of at least this times the probability of the most probable one; 0 is no filter.
        stop: texts that end the sequence, however they fall into tokens; the token that completes one is part of the
            result. The engine needs its ``tokenizer`` for them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 0, "0 or more"),
            ("temperature", 0.0 <= self.temperature < math.inf, "0 (greedy) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]; 1 turns it off"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive number"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]; 0 turns it off"),
            ("n", self.n >= 1, "1 or more"),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "texts that are not empty"),
            ("seed", -_INT64 <= self.seed < _INT64, "a 64-bit integer"),
        ):
            if not good:
                raise GenerationError(f"sampling parameter {name} = {getattr(self, name)!r}: expected {expected}")


@dataclass
class Request:
    """One prompt.

    Attributes:
        key: (step, prompt id, sample id); with the run's seed it fixes all noise.
        request_id: name of the request in results and for :meth:`GenerationEngine.abort`; by default its index.
    """

    prompt_ids: list[int]
    params: SamplingParams
    key: tuple[int, int, int] = (0, 0, 0)
    request_id: str = ""


@dataclass
class Result:
    """One sampled sequence.

    Attributes:
        request_index: position of the request in the call.
        token_ids: the tokens drawn, a stop token included.
        logprobs: of each token under softmax(logits / temperature) over the true vocabulary, before top-k and top-p;
            temperature 1 where sampling is greedy. The trainer recomputes exactly this number.
        sampled_logprobs: of each token under the distribution that it was drawn from: temperature, then the filters,
            renormalised. 0 where sampling is greedy.
        plain_logprobs: of each token under softmax(logits), temperature 1, no filters.
        finish_reason: ``"stop"`` after a stop token or text, ``"abort"`` when it was aborted, otherwise ``"length"``.
        small_margins: draws whose two best candidates were within 1e-5 of each other, so that the last bit of a logit
            (another batch, another number of ranks) could have changed them.
        sample_index: which of the request's ``n`` samples.
        request_id: the request's name.
    """

    request_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    plain_logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    small_margins: int = 0
    sample_index: int = 0
    request_id: str = ""


@dataclass(frozen=True)
class Progress:
    """State of a call after a step: sequences waiting, running and finished, and tokens drawn so far."""

    waiting: int
    running: int
    finished: int
    tokens: int


OnFinish = Callable[[Result], None]
OnStep = Callable[[Progress], None]


class GenerationEngine(Protocol):
    """What the actor and the sampling flow need. All ranks of a replica make the same calls.

    Attributes:
        weights_version: of the weights it has; whoever loads them sets it. ``None``: nothing loaded.
        expected_version: that generation must have; ``None`` accepts any.
        tokenizer: decodes what is drawn where a request has stop texts; ``None``: such requests are refused.
    """

    weights_version: int | None
    expected_version: int | None
    tokenizer: Any

    def generate(
        self, requests: Sequence[Request], on_finish: OnFinish | None = None, on_step: OnStep | None = None
    ) -> list[Result]:
        """Sample every request; results ordered by (request, sample), ``on_finish`` as each sequence ends."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request of the running call; its samples keep what they have and finish with ``"abort"``."""
        ...

    def allocate_cache(self) -> int:
        """Take the memory of the key/value cache, as far as that is done ahead; bytes newly allocated."""
        ...

    def release_cache(self) -> int:
        """Give back what training needs; bytes freed."""
        ...


class FedEngine(GenerationEngine, Protocol):
    """An engine with a model of its own, which takes Hugging Face tensors."""

    def load_weights(self, tensors: Iterator[tuple[str, "Tensor"]]) -> None:
        """Take (name, tensor) pairs of the whole model; a tensor is valid until the next module's first one.

        Raises:
            GenerationError: a tensor that the model has not, or one that never came, by name.
        """
        ...
