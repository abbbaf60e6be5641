"""Continuous batching: which sequences run, in which slots, and who comes next. No tensors, no model."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl3d.generation.engine import Request, Result, SamplingParams
from rl3d.generation.kv_cache import KVCache
from rl3d.generation.noise import sequence_key


@dataclass
class RunningSequence:
    """A sequence on its way: its request, its noise key and the result being filled."""

    prompt: list[int]
    params: SamplingParams
    noise_key: int
    stops: frozenset[int]
    result: Result

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.result.token_ids)

    def accept(self, token: int, logprob: float, close: bool) -> bool:
        """Take a drawn token; whether the sequence has ended with it."""
        result = self.result
        result.token_ids.append(token)
        result.logprobs.append(logprob)
        result.small_margins += close
        if token in self.stops:
            result.finish_reason = "stop"
            return True
        return len(result.token_ids) >= self.params.max_new_tokens


@dataclass
class Admission:
    """Sequences that start together: the first slot of each distinct prompt is filled, the others copy from it."""

    prompts: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # one per distinct prompt
    prompt_of: list[int] = field(default_factory=list)  # per admitted sequence, in slot order: index into prompts
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (slot with the prompt, slot, tokens)


def expand(requests: Sequence[Request]) -> list[RunningSequence]:
    """One sequence per sample, ordered by (request, sample)."""
    out = []
    for index, request in enumerate(requests):
        step, prompt_id, sample_id = request.key
        params = request.params
        stops = frozenset(params.stop_token_ids)
        for i in range(params.n):
            key = sequence_key(params.seed, step, prompt_id, sample_id + i)
            out.append(RunningSequence(request.prompt_ids, params, key, stops, Result(index, sample_index=i)))
    return out


class Scheduler:
    """First come, first served; running sequences occupy the slots ``0 .. len(running) - 1``.

    Args:
        max_prefill_tokens: prompt tokens computed in one pass; a longer prompt passes alone.
    """

    def __init__(self, sequences: Sequence[RunningSequence], cache: KVCache, max_prefill_tokens: int) -> None:
        self.waiting = deque(sequences)
        self.running: list[RunningSequence] = []
        self.cache = cache
        self.max_prefill_tokens = max_prefill_tokens

    def admit(self) -> Admission | None:
        """Start as many waiting sequences as slots, pages and the prefill limit allow; ``None`` if none can."""
        admission = Admission()
        known: dict[tuple[int, ...], int] = {}
        tokens = 0
        while self.waiting and len(self.running) < self.cache.max_sequences:
            sequence = self.waiting[0]
            need = len(sequence.prompt) + sequence.params.max_new_tokens
            if not self.cache.fits(need):
                break
            prompt = tuple(sequence.prompt)
            fresh = prompt not in known
            if fresh and known and tokens + len(prompt) > self.max_prefill_tokens:
                break
            self.waiting.popleft()
            slot = len(self.running)
            self.running.append(sequence)
            self.cache.reserve(slot, need)
            if fresh:
                known[prompt] = len(admission.prompts)
                admission.prompts.append(sequence.prompt)
                admission.slots.append(slot)
                tokens += len(prompt)
            else:
                admission.copies.append((admission.slots[known[prompt]], slot, len(prompt)))
            admission.prompt_of.append(known[prompt])
        return admission if admission.prompts else None

    def retire(self, rows: list[int]) -> list[RunningSequence]:
        """End the sequences in the given slots; the last running ones move into the holes."""
        ended = [self.running[row] for row in rows]
        for row in sorted(rows, reverse=True):
            self.cache.release(row)
            last = len(self.running) - 1
            if row != last:
                self.running[row] = self.running[last]
                # the newest token's key and value are written by the next step
                self.cache.move(last, row, self.running[row].length - 1)
            self.running.pop()
        return ended
