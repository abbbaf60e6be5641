"""What a rollout of the actor gives, and how it becomes samples to learn from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl3d.algorithms.advantages import grpo_advantages
from rl3d.engine.batches import real_tokens, response_spans
from rl3d.engine.policy import TrainSample
from rl3d.generation.engine import Result


@dataclass
class RolloutOutput:
    """What :meth:`Actor.rollout` returns, equal on every rank; B sequences, P prompt columns, R response columns.

    Attributes:
        sequences: [B, P + R] token ids; the prompt columns as they were given, then the response, right-padded.
        logprobs: [B, R] log-probability of each response token at the sampling temperature, 0 where padded.
        response_mask: [B, R] bool, true on response tokens (the stop token included).
        finish_reasons: ``"stop"`` or ``"length"`` for each sequence.
    """

    sequences: Tensor
    logprobs: Tensor
    response_mask: Tensor
    finish_reasons: list[str]

    @classmethod
    def of(cls, results: Sequence[Result], input_ids: Tensor, pad: int) -> "RolloutOutput":
        """The results of the rows of ``input_ids`` [B, P], in their order, as rectangles."""
        width = max((len(r.token_ids) for r in results), default=0)
        responses = torch.full((len(results), width), pad, dtype=torch.int64)
        logprobs = torch.zeros(len(results), width)
        mask = torch.zeros(len(results), width, dtype=torch.bool)
        for row, result in enumerate(results):
            n = len(result.token_ids)
            responses[row, :n] = torch.tensor(result.token_ids, dtype=torch.int64)
            logprobs[row, :n] = torch.tensor(result.logprobs)
            mask[row, :n] = True
        device = input_ids.device
        sequences = torch.cat([input_ids.cpu(), responses], dim=1).to(device)
        return cls(sequences, logprobs.to(device), mask.to(device), [r.finish_reason for r in results])


@dataclass
class Remembered:
    """A rollout whose prompt boundaries an update finds again."""

    output: RolloutOutput
    prompts: list[list[int]]
    temperature: float


def boundaries(remembered: Sequence[Remembered], sequences: Tensor, response_mask: Tensor | None,
               attention_mask: Tensor | None, pad: int) -> tuple[list[list[int]], list[list[int]], float]:  # fmt: skip
    """(prompts, responses, temperature) of sequences [B, P + R]: as a rollout left them, or as ``response_mask`` says.

    Raises:
        ValueError: no rollout gave these sequences, and there is no mask.
    """
    known = next((m for m in reversed(remembered) if torch.equal(m.output.sequences, sequences)), None)
    if known is not None and response_mask is None:
        return known.prompts, response_spans(sequences, known.output.response_mask), known.temperature
    if response_mask is None:
        raise ValueError(
            "update(): these sequences did not come from this actor's rollout(); pass response_mask=[B, R], true on "
            "the response tokens"
        )
    spans = response_spans(sequences, response_mask)
    first = sequences.shape[1] - response_mask.shape[1]
    if response_mask.shape[1] == sequences.shape[1]:
        first = int(response_mask.int().argmax(dim=1).min())
    head_mask = None if attention_mask is None else attention_mask[:, :first]
    return real_tokens(sequences[:, :first], head_mask, pad), spans, 1.0


def train_samples(prompts: list[list[int]], spans: list[list[int]], rewards: Tensor, old_logprobs: Tensor,
                  normalize_by_std: bool) -> list[TrainSample]:  # fmt: skip
    """Samples with advantages relative to the other responses to the same prompt, or, when every prompt occurs once,
    relative to the whole batch.

    Args:
        prompts, spans: tokens of each prompt and response.
        rewards: [B]; a NaN leaves that sequence out.
        old_logprobs: [B, R] at sampling time, of which the first ``len(span)`` count.
        normalize_by_std: divide by the standard deviation of a group.

    Raises:
        ValueError: not one reward and one row for each sequence.
    """
    if len(rewards) != len(spans) or len(old_logprobs) != len(spans):
        raise ValueError(
            f"update(): {len(spans)} sequences, {len(rewards)} rewards and {len(old_logprobs)} rows of old_logprobs; "
            f"expected one of each for every sequence"
        )
    ids: dict[tuple[int, ...], int] = {}
    group = torch.tensor([ids.setdefault(tuple(p), len(ids)) for p in prompts])
    if len(ids) == len(prompts):
        group = torch.zeros_like(group)
    scores = rewards.detach().float().cpu()
    advantages = grpo_advantages(scores, group, normalize_by_std=normalize_by_std).tolist()
    valid = scores.isfinite().tolist()
    rows = old_logprobs.detach().float().cpu().tolist()
    return [
        TrainSample(prompt, span, advantage, row[: len(span)], ok, score)
        for prompt, span, advantage, row, ok, score in zip(prompts, spans, advantages, rows, valid, scores.tolist())
    ]
