"""The steps of one call: what is computed next, what is started before the last draw is read, and who ends.

A step is started as soon as it is known what it computes, not when the one before it has been read: the device goes from
one to the next, and the host reads a draw while the next is under way. Who ends with that draw has been computed once more
by then, which nobody reads; its row stays in the batch as padding until a smaller bucket will do, or others join.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl3d.generation.decode import DecodeState
from rl3d.generation.graphs import PendingDraw
from rl3d.generation.sampler import Draw, SamplingBatch
from rl3d.generation.scheduler import Chunk, RunningSequence, Scheduler, sampling_columns
from rl3d.generation.transfer import to_device

if TYPE_CHECKING:
    from rl3d.generation.megatron import MegatronGenerator

_Started = tuple[list[RunningSequence], Draw | PendingDraw | None]  # a step's sequences and their draws, if any


class Steps:
    """The steps that serve a scheduler's sequences on one generator."""

    def __init__(self, engine: "MegatronGenerator", scheduler: Scheduler) -> None:
        self.engine, self.scheduler = engine, scheduler
        self._state: DecodeState | None = None
        self._ahead: _Started | None = None

    @property
    def ahead(self) -> bool:
        """Whether a step is under way whose draw has not been read."""
        return self._ahead is not None

    def advance(self, look_ahead: bool) -> list[RunningSequence]:
        """Read the draw of the next step, with ``look_ahead`` when another is under way already; who ended with it."""
        scheduler = self.scheduler
        if self._ahead is not None:
            (drawing, draw), self._ahead = self._ahead, None
        elif chunks := scheduler.plan_prefill():
            drawing, draw = self._prefill(chunks)
        else:
            drawing, draw = self._decode()
        if look_ahead and self.engine.runner is not None:
            if chunks := scheduler.plan_prefill():
                self._ahead = self._prefill(chunks)
            elif self._goes_on():
                self._ahead = self._decode()
        ended = [] if draw is None else self._accept(drawing, draw)
        self._retire(ended)
        return ended

    def _goes_on(self) -> bool:
        """Whether the decode step after that under way can start before its draw is read: with the same rows, and for
        somebody who does not end by length."""
        scheduler, state = self.scheduler, self._state
        if state is None or state.membership != scheduler.membership or scheduler.prefilling or not scheduler.has_room:
            return False
        return any(len(s.result.token_ids) + 1 < s.params.max_new_tokens for s in scheduler.running)

    def _retire(self, ended: Sequence[RunningSequence]) -> None:
        if not ended:
            return
        scheduler, state, runner = self.scheduler, self._state, self.engine.runner
        same = state is not None and state.membership == scheduler.membership
        scheduler.retire(ended)
        if same and runner is not None and runner.keeps(len(scheduler.running)):
            assert state is not None
            runner.drop([s.row for s in ended])
            state.membership = scheduler.membership

    def _prefill(self, chunks: list[Chunk]) -> _Started:
        """Compute chunks of prompts; the sequences whose prompts are complete, and the first token of each."""
        engine = self.engine

        def indices(values: list[int]) -> torch.Tensor:
            return to_device(values, torch.int64, engine.device)

        flat = [token for chunk in chunks for token in chunk.tokens]
        padding = max(0, engine.min_rows - len(flat))
        engine.context.plan_prefill(chunks, padding)
        complete = [i for i, chunk in enumerate(chunks) if chunk.last]
        wanted = complete or [0]
        wanted = wanted + wanted[-1:] * (engine.min_rows - len(wanted))
        rows = engine.context.last.index_select(0, indices(wanted))
        ids = indices(flat + [0] * padding)
        if engine.runner is None:
            logits = engine.body.forward(ids, rows)
        else:
            logits = engine.runner.body.prefill(ids, rows, engine.context)
        if not complete:
            return [], None
        sequences, prompt_of = self.scheduler.start_decoding(chunks)
        logits = logits.index_select(0, indices(prompt_of))
        positions = indices([s.length for s in sequences])
        sampling = SamplingBatch.build(**sampling_columns(sequences), device=engine.device)
        draw = engine.sampler.draw(logits, sampling, positions)
        return sequences, draw if engine.runner is None else PendingDraw.of(draw)

    def _decode(self) -> _Started:
        """One token for every sequence of the batch, which is put together anew when its members have changed."""
        engine, scheduler, state = self.engine, self.scheduler, self._state
        plan = scheduler.plan_decode()
        engine.cache.copy_pages(plan.copies)
        if state is None or state.membership != scheduler.membership:
            self._state = state = DecodeState(
                scheduler.running, scheduler.membership, engine.body.decode_rows, engine.device
            )
            scheduler.counts.batches += 1
            engine.table.fill(state.members)
            if engine.runner is not None:
                engine.runner.load(state.tokens[: state.rows], state.positions[: state.rows], state.sampling)
        else:
            engine.table.update(plan.grown)
        state.longest += 1
        if engine.runner is not None:
            return state.members, engine.runner.step(state.longest - 1)
        engine.context.plan_decode(state.positions, engine.table.tensor, state.rows, state.longest - 1)
        logits = engine.body.forward(state.tokens, None)[: state.rows]
        state.positions += 1
        draw = engine.sampler.draw(logits, state.sampling, state.positions[: state.rows])
        state.tokens[: state.rows] = draw.tokens
        return state.members, draw

    def _accept(self, sequences: Sequence[RunningSequence], draw: Draw | PendingDraw) -> list[RunningSequence]:
        """Give each sequence that goes on the token drawn for it; those that ended with it."""
        ended = []
        for sequence, (token, close, logprob, sampled, plain) in zip(sequences, draw.to_host(), strict=True):
            if sequence.ended:
                continue
            if logprob != logprob or sampled != sampled or plain != plain:
                raise FloatingPointError(
                    f"request {sequence.result.request_index}: the model returned logits that are not numbers at "
                    f"position {sequence.length} (weights version {self.engine.weights_version}); check the weights"
                )
            self.scheduler.counts.drawn += 1
            if sequence.accept(token, close, logprob, sampled, plain):
                ended.append(sequence)
        return ended
