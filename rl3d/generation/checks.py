"""What is checked before anything runs: limits of an engine, requests, and that the ranks were asked the same."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from rl3d.generation.engine import GenerationError, Request


def check_requests(requests: Sequence[Request], vocab_size: int, longest: int, page_size: int, pages: int | None) -> None:
    """Raise GenerationError for a request that can never be served; the message names it, the value and the limit."""
    names: set[str] = set()
    for index, request in enumerate(requests):
        prompt, params = request.prompt_ids, request.params
        name = f"request {index} (key {request.key})"
        if request.request_id:
            if request.request_id in names:
                raise GenerationError(f"{name}: request_id {request.request_id!r} was given twice; make them unique")
            names.add(request.request_id)
        if not prompt:
            raise GenerationError(f"{name}: the prompt is empty; give at least one token, for example BOS")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(t for t in prompt if not 0 <= t < vocab_size)
            raise GenerationError(
                f"{name}: prompt token {bad} is outside the vocabulary of {vocab_size}; use the tokenizer of this model"
            )
        need = len(prompt) + params.max_new_tokens
        if need > longest:
            raise GenerationError(
                f"{name}: prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} = {need} exceeds "
                f"max_sequence_length {longest}; shorten the prompt, lower max_new_tokens or raise the limit"
            )
        if pages is not None and -(-need // page_size) > pages:
            raise GenerationError(
                f"{name}: prompt of {len(prompt)} tokens + max_new_tokens {params.max_new_tokens} needs "
                f"{-(-need // page_size)} pages of {page_size} tokens, the pool has {pages}; enlarge the pool"
            )


def check_agreement(requests: Sequence[Request], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise on every rank when the ranks of a replica were asked different things: later it would be a hang."""
    if group is None:
        return
    text = repr([(r.prompt_ids, r.key, r.params, r.request_id) for r in requests]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    mine = torch.tensor([digest], dtype=torch.int64, device=device)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    digests = [int(part) for part in parts]
    if len(set(digests)) > 1:
        raise GenerationError(
            f"the {len(digests)} tensor-parallel ranks of this replica were given different requests (digests "
            f"{[f'{d:014x}' for d in digests]}); pass the same list on all of them"
        )


def check_limits(model: GPTModel, max_sequences: int, max_sequence_length: int, page_size: int | None,
                  pages: int | None, max_prefill_tokens: int) -> None:  # fmt: skip
    for name, value in (("max_sequences", max_sequences), ("max_sequence_length", max_sequence_length),
                        ("page_size", page_size), ("pages", pages), ("max_prefill_tokens", max_prefill_tokens)):  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"generator: {name} = {value}, expected at least 1")
    if max_sequence_length > model.max_sequence_length:
        raise ValueError(
            f"generator: max_sequence_length {max_sequence_length} exceeds the {model.max_sequence_length} positions "
            f"that the model knows (max_position_embeddings, or a shorter sliding window); lower it"
        )
    if model.config.sequence_parallel:
        raise ValueError(
            "generator: the model was built with sequence_parallel = True, which splits single tokens over ranks; "
            "build the generation model with sequence_parallel=False"
        )
    if not (model.pre_process and model.post_process):
        raise ValueError("generator: the model is one pipeline stage; generation needs all layers (pp = 1)")
