"""A reward model in the policy's training layout: scores whole sequences at a phase boundary, forward only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d.data.balancing import pack, split_for_dp
from rl3d.engine.actor import Actor
from rl3d.engine.assemble import load_value_model
from rl3d.engine.download import local_directory
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.roles import ForwardRole
from rl3d.engine.tally import Tally


class RewardModel:
    """A sequence classifier with one label whose score of a sequence is the value at its last token.

    It reads the policy's token ids, so it must have the policy's tokenizer.

    Args:
        actor: whose layout, groups and dtype the model shares. Collective over all ranks.
        model: directory or hub id.
        residency: ``"device"``, or ``"host"`` to keep the weights in host memory between uses.
        micro_batch_tokens: tokens in one packed row.

    Raises:
        UnsupportedModelError: no classifier, several labels, another vocabulary, or a model that the layout cannot cut.
        CheckpointError: the weights do not match the configuration.
    """

    def __init__(self, actor: Actor, model: str | Path, *, residency: str = "device", micro_batch_tokens: int = 4096):
        parts, self.runtime, self.budget = actor.parts, actor.runtime, micro_batch_tokens
        directory = local_directory(model, actor.runtime)
        module, arch, _ = load_value_model(directory, parts, needs_head=True)
        self.groups, self.max_positions = parts.groups, arch.max_positions
        self.role = ForwardRole(module, arch, parts.groups, residency=residency, sharded=actor.settings.train.zero == 3)
        self._tally = Tally(parts.groups, actor.runtime.cpu_group)

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Score of each sequence of token ids (prompt and response together), the same on every rank. Collective.

        Every rank passes the same sequences; data-parallel ranks share the work.

        Raises:
            ValueError: a sequence that is empty or longer than the model's positions.
        """
        lengths = [len(s) for s in sequences]
        if lengths and not 0 < min(lengths) <= max(lengths) <= self.max_positions:
            raise ValueError(
                f"reward model: sequences of {min(lengths)} to {max(lengths)} tokens; expected 1 to {self.max_positions}, "
                f"its max_position_embeddings"
            )
        mine = split_for_dp(lengths, self.groups.dp_size)[self.groups.dp_rank]
        bins = [[mine[i] for i in b] for b in pack([lengths[i] for i in mine], self.budget)]
        rows = [_row([sequences[i] for i in b]) for b in bins]
        found: dict[int, float] = {}
        for indices, values in zip(bins, self.role.values(rows)):
            found.update(zip(indices, values.tolist(), strict=True))
        every: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(every, found if self._tally.speaks else {}, group=self.runtime.cpu_group)
        together = {index: score for part in every for index, score in part.items()}
        return [together[i] for i in range(len(lengths))]


def _row(sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """Sequences end to end; the last token of each is looked at."""
    lengths = [len(s) for s in sequences]
    last = torch.tensor(lengths).cumsum(0) - 1
    tokens = torch.tensor([token for s in sequences for token in s], dtype=torch.int64)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return MicroBatch(tokens, positions, tuple(lengths), last, tokens[last], counts=(1,) * len(lengths))
