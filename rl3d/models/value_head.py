"""The value head as a module, and how it takes the place of a vocabulary in megatron-core's ``GPTModel``."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor

from rl3d.models.architecture import Architecture


class ValueHead(torch.nn.Module):
    """Hidden state -> value, in fp32 whatever the weights' dtype.

    Every tensor-parallel rank holds all of it and computes the same values from the same hidden states, so its gradient
    needs no reduction over them. Starts at zero: the first values are 0 on every layout, and no noise of a random head
    enters the first advantages.
    """

    sequence_parallel = False

    def __init__(self, hidden_size: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype)) if bias else None

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N, hidden] -> values [N], fp32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden_NH.float(), self.weight.float(), bias)[:, 0]


def put_value_head(model: Any, arch: Architecture, padded_vocab: int) -> None:
    """Give a ``GPTModel`` that was built for a vocabulary of one token per rank its embedding and a value head.

    A projection to the real vocabulary, by far the largest matrix of a small model, never exists.
    """
    if model.pre_process:
        model.embedding = LanguageModelEmbedding(
            model.config, padded_vocab, model.max_sequence_length, position_embedding_type="rope",
            tp_group=model.pg_collection.tp,
        )  # fmt: skip
    if model.post_process:
        model.output_layer = ValueHead(arch.hidden_size, arch.value_bias, model.config.params_dtype)
    model.vocab_size = padded_vocab
    model.setup_embeddings_and_output_layer()
