"""A larger vocabulary: weights leave for host memory, the model is made again, and they come back with new rows.

Nothing goes through files, and of the whole model a rank sees the embedding and the output projection only, in host memory.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl3d.distributed.groups import ModelGroups
from rl3d.layout import ParamSpec

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass
class Carried:
    """A model's weights in host memory: ``local`` tensor-parallel shards, and ``rows`` of the whole vocabulary, padding
    left out."""

    local: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def take(weights: Mapping[str, Tensor], specs: Sequence[ParamSpec], vocab_size: int, groups: ModelGroups,
         flat: bool) -> Carried:  # fmt: skip
    """Copy a model's weights to host memory. Collective over tp, with ``flat`` over dp as well.

    Args:
        weights: canonical name -> this rank's shard, or its flat part (ZeRO stage 3) with ``flat``.
        vocab_size: rows that are no padding.
    """
    out = Carried()
    for spec in specs:
        if spec.name not in weights:
            continue
        shard, shape = weights[spec.name].detach().contiguous(), spec.local_shape(groups.tp_size)
        if flat:
            parts = [torch.empty_like(shard) for _ in range(groups.dp_size)]
            dist.all_gather(parts, shard, group=groups.dp)
            shard = torch.cat(parts)[: torch.Size(shape).numel()].view(shape)
        if spec.name not in VOCABULARY:
            out.local[spec.name] = shard.to("cpu", copy=True)
            continue
        parts = [torch.empty_like(shard) for _ in range(groups.tp_size)]
        dist.all_gather(parts, shard, group=groups.tp)
        out.rows[spec.name] = torch.cat([part.cpu() for part in parts])[:vocab_size]
    return out


@torch.no_grad()
def put(carried: Carried, parameters: Mapping[str, Tensor], specs: Sequence[ParamSpec], vocab_size: int,
        groups: ModelGroups) -> None:  # fmt: skip
    """Write carried weights into the parameters of the same model with a vocabulary of ``vocab_size``.

    New rows are the mean of the old ones, so that a token that was never seen is neither likely nor loud (what
    transformers' ``resize_token_embeddings`` draws its new rows around). Padding rows are zero.
    """
    sizes = {spec.name: spec for spec in specs}
    for name, parameter in parameters.items():
        if name in carried.local:
            parameter.copy_(carried.local[name])
            continue
        old = carried.rows[name]
        whole = old.new_zeros(sizes[name].shape)
        whole[: len(old)] = old
        whole[len(old) : vocab_size] = old.float().mean(0).to(old.dtype)
        size = len(whole) // groups.tp_size
        parameter.copy_(whole[groups.tp_rank * size : (groups.tp_rank + 1) * size])


def free_memory() -> None:
    """Let go of models that nobody refers to any more; DeepSpeed's engines refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def agreed_size(size: int, group: Any) -> int:
    """``size``, when it is the same on all ranks. Raises ValueError on every rank otherwise."""
    sizes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, size, group=group)
    if len(set(sizes)) > 1:
        raise ValueError(f"set_tokenizer(): the ranks have tokenizers of {sizes} tokens; give all of them the same one")
    return size
