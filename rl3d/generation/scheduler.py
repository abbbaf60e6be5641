"""Continuous batching over pages: which sequences run, what is computed next, who gives way. No tensors, no model.

A step computes either chunks of prompts, packed one after the other, or one token of every running sequence. Prompts
come first, so that the decode batch is as full as it can be. Pages are taken as they are needed; when there are none,
the youngest running sequence gives its own back and is computed again later, to the same result because its noise
depends on nothing but its key and positions.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl3d.generation.engine import GenerationError, Request, Result, SamplingParams
from rl3d.generation.noise import sequence_key
from rl3d.generation.pages import PagePool, page_hashes
from rl3d.generation.stops import StopTexts


@dataclass(eq=False)
class RunningSequence:
    """A sequence on its way: its request, its noise key, the result being filled and its place in the cache.

    Attributes:
        order: place in the queue of the call; the highest is the youngest.
        pages: pages held, in the order of the tokens.
        computed: tokens whose keys and values are in them.
        followers: samples of the same prompt that wait for this one's prefill.
        texts: stop texts to look for, if any.
    """

    prompt: list[int]
    params: SamplingParams
    noise_key: int
    stops: frozenset[int]
    result: Result
    order: int = 0
    texts: StopTexts | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    followers: list["RunningSequence"] = field(default_factory=list)
    shares_tail: bool = False  # the last page is not full and may have other holders
    hashes: list[bytes] = field(default_factory=list)
    row: int = -1  # of the block table, while decoding
    ended: bool = False
    draws: dict[int, tuple[int, bool, float, float, float]] = field(default_factory=dict)  # not yet accepted, by position

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.result.token_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and response so far."""
        return self.prompt + self.result.token_ids

    def accept(self, token: int, close: bool, logprob: float, sampled: float, plain: float) -> bool:
        """Take a drawn token (a row of :meth:`rl3d.generation.sampler.Draw.to_host`); whether the sequence ends with it."""
        result = self.result
        result.token_ids.append(token)
        result.logprobs.append(logprob)
        result.sampled_logprobs.append(sampled)
        result.plain_logprobs.append(plain)
        result.small_margins += close
        if token in self.stops or (self.texts is not None and self.texts.found(result.token_ids)):
            result.finish_reason = "stop"
            self.ended = True
        elif len(result.token_ids) >= self.params.max_new_tokens:
            self.ended = True
        return self.ended


@dataclass
class Chunk:
    """Tokens ``start .. start + len(tokens) - 1`` of a sequence, to be computed in this step; ``last`` ends a prefill."""

    sequence: RunningSequence
    start: int
    tokens: list[int]
    last: bool


@dataclass
class Room:
    """What a decode step needs first: pages to copy, ``{target: source}``, and the sequences whose pages changed."""

    copies: dict[int, int] = field(default_factory=dict)
    grown: list[RunningSequence] = field(default_factory=list)


@dataclass
class Counts:
    """What a call cost: prompt tokens computed and found, tokens drawn, sequences that had to give way, and decode batches
    put together, for each of which the device waits."""

    prefilled: int = 0
    reused: int = 0
    drawn: int = 0
    preempted: int = 0
    batches: int = 0


def expand(requests: Sequence[Request], tokenizer: Any = None) -> list[RunningSequence]:
    """One sequence per sample, ordered by (request, sample).

    Raises:
        GenerationError: stop texts without a ``tokenizer``.
    """
    out: list[RunningSequence] = []
    for index, request in enumerate(requests):
        step, prompt_id, sample_id = request.key
        params = request.params
        stops = frozenset(params.stop_token_ids)
        name = request.request_id or str(index)
        if params.stop and tokenizer is None:
            raise GenerationError(
                f"request {index} (key {request.key}): stop = {params.stop!r} needs the text of what is drawn; set the "
                f"engine's tokenizer, or use stop_token_ids"
            )
        texts = StopTexts(params.stop, tokenizer) if params.stop else None
        for i in range(params.n):
            key = sequence_key(params.seed, step, prompt_id, sample_id + i)
            result = Result(index, sample_index=i, request_id=name)
            out.append(RunningSequence(request.prompt_ids, params, key, stops, result, order=len(out), texts=texts))
    return out


def sampling_columns(sequences: Sequence[RunningSequence]) -> dict[str, list[Any]]:
    """The rows of a :class:`rl3d.generation.sampler.SamplingBatch` by column."""
    params = [s.params for s in sequences]
    columns = {name: [getattr(p, name) for p in params] for name in ("temperature", "top_p", "top_k", "min_p")}
    return {"keys": [s.noise_key for s in sequences], **columns}


class Scheduler:
    """First come, first served. The decode batch is :attr:`running`, in its order.

    Prompts join a running batch several at once, when a sixteenth of all places is free or as many as there are prompts: a
    pass over one prompt takes the host as long as over many, and the device several decode steps.

    Args:
        max_sequences: sequences that hold pages at once.
        max_prefill_tokens: tokens of a prefill step; a longer prompt takes several.
        share_prefixes: whether pages of prompts seen before are used again.
    """

    def __init__(self, sequences: Sequence[RunningSequence], pool: PagePool, *, max_sequences: int,
                 max_prefill_tokens: int, share_prefixes: bool = True) -> None:  # fmt: skip
        self.waiting = deque(sequences)
        self.prefilling: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self.pool, self.counts = pool, Counts()
        self.max_sequences, self.max_prefill_tokens = max_sequences, max_prefill_tokens
        self.share_prefixes = share_prefixes
        self.membership = 0  # changes with the members of ``running``
        self._following = 0
        self._patience = max(1, max_sequences // 16)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    # ---- prompts

    def plan_prefill(self) -> list[Chunk]:
        """What to compute of prompts in this step; empty when it is time to decode."""
        if self.running and not self.prefilling and self._places() < min(self._patience, len(self.waiting)):
            return []
        budget = self.max_prefill_tokens
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget > 0:
                chunks.append(self._cut(sequence, budget))
                budget -= len(chunks[-1].tokens)
        leaders = {tuple(s.tokens): s for s in self.prefilling}
        while self.waiting and self._places() > 0:
            sequence = self.waiting[0]
            tokens = sequence.tokens
            leader = leaders.get(tuple(tokens))
            if leader is not None:
                if self.pool.available <= self._following + self._headroom():
                    break
                leader.followers.append(self.waiting.popleft())
                self._following += 1
                continue
            if budget <= 0 or not self._seat(sequence, tokens):
                break
            self.prefilling.append(self.waiting.popleft())
            leaders[tuple(tokens)] = sequence
            chunks.append(self._cut(sequence, budget))
            budget -= len(chunks[-1].tokens)
        return chunks

    def _places(self) -> int:
        """Sequences that may join."""
        return self.max_sequences - len(self.prefilling) - len(self.running) - self._following

    def _headroom(self) -> int:
        """Pages left to the running sequences, so that what is admitted does not drive them out at once."""
        return len(self.running) // self.pool.page_size + bool(self.running)

    def _seat(self, sequence: RunningSequence, tokens: list[int]) -> bool:
        """Give a sequence its pages for ``tokens``, known ones where there are some; whether there was room."""
        pool = self.pool
        # the last token is always computed: its logits are wanted
        full = (len(tokens) - 1) // pool.page_size
        sequence.hashes = page_hashes(tokens, pool.page_size, full) if self.share_prefixes else []
        found = pool.find(sequence.hashes)
        pool.retain(found)
        need = pool.pages_for(len(tokens)) - len(found)
        if need + self._following + self._headroom() > pool.available:
            pool.release(found)
            return False
        sequence.pages = found + [pool.allocate() for _ in range(need)]
        sequence.computed = len(found) * pool.page_size
        self.counts.reused += sequence.computed
        return True

    def _cut(self, sequence: RunningSequence, budget: int) -> Chunk:
        start = sequence.computed
        tokens = sequence.tokens[start : start + budget]
        sequence.computed = end = start + len(tokens)
        # Published before they are computed: whoever finds them reads them in this step's layers after their writing.
        size = self.pool.page_size
        for i in range(start // size, min(end // size, len(sequence.hashes))):
            self.pool.publish(sequence.pages[i], sequence.hashes[i])
        self.counts.prefilled += len(tokens)
        return Chunk(sequence, start, tokens, last=end == sequence.length)

    def start_decoding(self, chunks: Sequence[Chunk]) -> tuple[list[RunningSequence], list[int]]:
        """After a prefill step: sequences that draw their next token now, and for each the ``last`` chunk it is of.

        They join :attr:`running` in this order. Samples of the same prompt share its pages from here on.
        """
        drawing: list[RunningSequence] = []
        chunk_of: list[int] = []
        ended = [chunk.sequence for chunk in chunks if chunk.last]
        for i, leader in enumerate(ended):
            self.prefilling.remove(leader)
            group = [leader, *leader.followers]
            partial = len(group) > 1 and leader.computed % self.pool.page_size > 0
            for follower in leader.followers:
                self.pool.retain(leader.pages)
                follower.pages, follower.computed = list(leader.pages), leader.computed
                self.counts.reused += leader.computed
            for member in group:
                member.shares_tail = partial
            self._following -= len(leader.followers)
            leader.followers = []
            drawing += group
            chunk_of += [i] * len(group)
        self.running += drawing
        self.membership += 1
        return drawing, chunk_of

    # ---- decoding

    def plan_decode(self) -> Room:
        """Make room for one more token of every running sequence; youngest ones go back to waiting when there is none."""
        pool, size = self.pool, self.pool.page_size
        room = Room()
        wanting = [s for s in self.running if s.shares_tail or s.computed == len(s.pages) * size]
        for sequence in sorted(wanting, key=lambda s: s.order):
            if not sequence.pages:  # gave way to an older one just now
                continue
            copy = sequence.shares_tail
            if copy and not pool.shared(sequence.pages[-1]):
                sequence.shares_tail = False
                continue
            while sequence.pages and not pool.available:
                self._preempt(max(self.running, key=lambda s: s.order), room)
            if not sequence.pages:
                continue
            page = pool.allocate()
            if copy:
                room.copies[page] = sequence.pages[-1]
                pool.release(sequence.pages[-1:])
                sequence.pages[-1], sequence.shares_tail = page, False
            else:
                sequence.pages.append(page)
            room.grown.append(sequence)
        for sequence in self.running:
            sequence.computed += 1
        return room

    @property
    def has_room(self) -> bool:
        """Whether :meth:`plan_decode` would find its pages without anybody giving way."""
        size = self.pool.page_size
        return sum(s.shares_tail or s.computed == len(s.pages) * size for s in self.running) <= self.pool.available

    def _preempt(self, victim: RunningSequence, room: Room) -> None:
        for page in victim.pages:
            room.copies.pop(page, None)
        self.running.remove(victim)
        self.membership += 1
        self._free(victim)
        self.waiting.appendleft(victim)
        self.counts.preempted += 1

    # ---- ends

    def retire(self, ended: Sequence[RunningSequence]) -> None:
        """End running sequences; the order of the others stays."""
        if not ended:
            return
        self.membership += 1
        gone = set(map(id, ended))
        self.running = [s for s in self.running if id(s) not in gone]
        for sequence in ended:
            self._free(sequence)

    def abort(self, chosen: Callable[[RunningSequence], bool]) -> list[RunningSequence]:
        """Between steps: take out what ``chosen`` picks, wherever it is."""
        out = [s for s in (*self.waiting, *self.running) if chosen(s)]
        self.waiting = deque(s for s in self.waiting if not chosen(s))
        self.retire([s for s in self.running if chosen(s)])
        for leader in list(self.prefilling):
            cut = [s for s in leader.followers if chosen(s)]
            leader.followers = [s for s in leader.followers if not chosen(s)]
            self._following -= len(cut)
            out += cut
            if chosen(leader):
                # its followers start over; what it computed is found again by its hash
                self.waiting.extendleft(reversed(leader.followers))
                self._following -= len(leader.followers)
                leader.followers = []
                self.prefilling.remove(leader)
                self._free(leader)
                out.append(leader)
        return out

    def release_all(self) -> None:
        """Give all pages back, whatever is going on."""
        for sequence in (*self.prefilling, *self.running):
            self._free(sequence)
        self.prefilling, self.running = [], []

    def _free(self, sequence: RunningSequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.shares_tail = [], 0, False
