"""megatron-core's pipeline schedules over packed rows, on explicit process groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.engine.messages import StageMessages
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.vocab_parallel import token_logprobs
from rl3d.models import Architecture
from rl3d.models.build import model_chunks

# (logprobs_N, entropy_N, micro-batch), or (values_N, micro-batch) -> (loss to minimise, values to collect)
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class Pipeline:
    """Runs a model over micro-batches: forward only, or forward and backward (1F1B when there are stages,
    interleaved where a stage holds several chunks).

    Args:
        model: this rank's part, as :func:`rl3d.models.build.build_model` gives it.
        arch: what it is: the head on the last stage gives log-probabilities, or values.
        groups: where it lives.
        logprob_chunk: tokens whose fp32 logits exist at a time.
    """

    def __init__(self, model: Any, arch: Architecture, groups: ModelGroups, logprob_chunk: int = 1024):
        self.model, self.arch, self.groups, self.logprob_chunk = model, arch, groups, logprob_chunk
        self.training_forward: Callable[..., Any] = model  # ZeRO stages that reduce within a step wrap a whole one
        self._sequence_parallel = bool(model.config.sequence_parallel)
        self._row_multiple = groups.tp_size if self._sequence_parallel else 1
        self._collection = groups.pg_collection()
        self._messages = StageMessages(groups, model.config)
        # the loss is normalised over the global batch before it gets here: megatron-core must not divide again
        model.config.calculate_per_token_loss = True

    def run(self, batches: Sequence[MicroBatch], loss: LossFunction, temperature: float,
            forward_only: bool) -> list[dict[str, Any]]:  # fmt: skip
        """What ``loss`` collected for each micro-batch, in order; an empty list except on the last stage.

        Every rank of a pipeline must pass the same micro-batches.
        """
        device = next(self.model.parameters()).device
        rows = [b.to(device).padded(self._row_multiple) for b in batches]
        if self.groups.vpp > 1:  # megatron-core interleaves rounds of pp micro-batches
            rows += [rows[0].empty().padded(self._row_multiple)] * (-len(rows) % self.groups.pp_size)

        wrapped = self.groups.pp_size == 1 and not forward_only

        def forward_step(iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
            batch = next(iterator)
            out = (self.training_forward if wrapped else model)(
                batch.tokens_T[None], batch.positions_T[None], None, packed_seq_params=batch.boundaries(),
                output_processor=self._last_stage, output_processor_context=(batch, temperature),
            )  # fmt: skip

            def finish(result: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
                value, collected = loss(*result, batch)
                return value, torch.ones((), dtype=torch.int, device=device), collected

            return out, finish

        chunks = model_chunks(self.model)
        arguments: dict[str, Any] = {
            "forward_step_func": forward_step, "data_iterator": [iter(rows) for _ in chunks], "model": chunks,
            "num_microbatches": len(rows), "seq_length": 1, "micro_batch_size": 1, "forward_only": forward_only,
            "pg_collection": self._collection,
        }  # fmt: skip
        if self.groups.pp_size == 1:
            return forward_backward_no_pipelining(**arguments)
        self._messages.begin([len(row.tokens_T) for row in rows])
        run = forward_backward_pipelining_without_interleaving
        if self.groups.vpp > 1:
            run = forward_backward_pipelining_with_interleaving
        return run(**arguments, p2p_communicator=self._messages)[: len(batches)]

    def level(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """``batches`` and empty rows, as many as the data-parallel rank with the most has. Collective over dp."""
        device = next(self.model.parameters()).device
        most = torch.tensor(len(batches), device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.groups.dp)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        template = batches[0] if batches else MicroBatch(zero, zero, (1,), zero[:0], zero[:0])
        return [*batches, *[template.empty()] * (int(most) - len(batches))]

    def _last_stage(self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None,
                    context: tuple[MicroBatch, float], **_: Any) -> tuple[Tensor, ...]:  # fmt: skip
        batch, temperature = context
        if self._sequence_parallel:
            # what follows has the same gradient on all ranks: each takes its part of it
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        hidden_NH = hidden_states[:, 0].index_select(0, batch.select_N)
        if self.arch.value_head:
            return (output_layer(hidden_NH),)
        weight = output_weight if output_weight is not None else output_layer.weight
        return token_logprobs(
            hidden_NH, weight, batch.labels_N, vocab_size=self.arch.vocab_size,
            temperature=temperature, group=self.groups.tp, chunk=self.logprob_chunk,
        )  # fmt: skip

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """(log-probabilities [N], entropy [N]) of each micro-batch; an empty list except on the last stage."""
        return [(logprobs, entropy) for logprobs, entropy in self._outputs(batches, temperature)]

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [N], fp32, of each micro-batch of a value model; an empty list except on the last stage."""
        return [values for (values,) in self._outputs(batches, 1.0)]

    def _outputs(self, batches: Sequence[MicroBatch], temperature: float) -> list[tuple[Tensor, ...]]:
        if not batches:
            return []
        was_training = self.model.training
        self.model.eval()

        def keep(*result: Any) -> tuple[Tensor, dict[str, Any]]:
            outputs = result[:-1]
            return outputs[0].sum(), {"outputs": outputs}

        out = self.run(batches, keep, temperature, forward_only=True)
        self.model.train(was_training)
        return [o["outputs"] for o in out]
