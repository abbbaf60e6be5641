"""Writing the weights of an actor while they are sharded: what :class:`rl3d.engine.actor.Actor` inherits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl3d.distributed.bootstrap import Runtime
from rl3d.engine.hybrid import TRAINING
from rl3d.engine.source import ModelSource
from rl3d.io import export_hf, export_megatron


class Saving:
    """Needs what an actor has: its parts, modes, source, ranks, and the sequence of its operations."""

    parts: Any
    hybrid: Any
    source: ModelSource
    runtime: Runtime
    tokenizer: Any
    _own_tokenizer: bool
    _channel: Any

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face directory with tokenizer, chat template and generation configuration. Collective."""
        self._save("save_hf", export_hf, directory, dtype)

    def save_megatron(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a ``torch_dist`` directory, each rank its own shards, for megatron-core and ``rl3d convert``. Collective."""
        self._save("save_megatron", export_megatron, directory, dtype)

    def _save(self, name: str, export: Callable[..., None], directory: str | Path, dtype: torch.dtype | None) -> None:
        def run() -> None:
            self.hybrid.require(TRAINING, name)
            parts, train = self.parts, self.parts.train
            export(directory, self.source.directory, parts.arch, parts.padded_vocab, train.weights, parts.groups, dtype,
                   flat_shards=train.zero.shards_weights)  # fmt: skip
            if self._own_tokenizer and self.runtime.rank == 0:  # not the one that lies beside the weights' source
                self.tokenizer.save_pretrained(directory)
            self.runtime.barrier()

        self._channel.call(name, run)
