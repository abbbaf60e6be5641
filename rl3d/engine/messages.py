"""Messages between pipeline stages, with shapes that every stage knows already."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from rl3d.distributed.groups import ModelGroups


class StageMessages(P2PCommunicator):
    """megatron-core's communicator for rows of different lengths.

    megatron-core sends the shape ahead of each tensor and waits for it, on the host and the device. All stages have the
    same rows and follow the same table, so each knows what comes next; without the wait an interleaved schedule cannot
    lock up with two neighbours waiting for each other's shapes.
    """

    def __init__(self, groups: ModelGroups, config: Any):
        super().__init__(pp_group=groups.pp, config=config)
        self._groups = groups
        self._forward: Iterator[int] = iter(())
        self._backward: Iterator[int] = iter(())

    def begin(self, lengths: Sequence[int]) -> None:
        """Announce the rows of the coming pass: tokens of each."""
        groups = self._groups
        if self.config.sequence_parallel:  # each tensor-parallel rank holds its part of a row
            lengths = [length // groups.tp_size for length in lengths]
        table = get_schedule_table(len(lengths), groups.vpp, groups.pp_size)
        every = [lengths[row] for row, _ in table]
        # round the corner between last and first stage goes what is not at the end of the model yet
        around = [lengths[row] for row, chunk in table if chunk < groups.vpp - 1]
        self._forward = iter(around if groups.is_first_stage else every)
        self._backward = iter(around if groups.is_last_stage else every)

    def _communicate_shapes(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool,
                            recv_next: bool) -> tuple[list[int], list[int]]:  # fmt: skip
        def shape(lengths: Iterator[int]) -> list[int]:
            return [next(lengths), 1, self.config.hidden_size]

        nothing = [0, 0, 0]
        return shape(self._forward) if recv_prev else nothing, shape(self._backward) if recv_next else nothing
