"""Training engines of the tiny models at any layout, for checks that run on several ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl3d.distributed.groups import GroupRegistry, ModelGroups, training_groups
from rl3d.engine.training import TrainingEngine
from rl3d.engine.zero import AdamSettings
from rl3d.io import import_hf
from rl3d.layout import Mesh, TrainLayout
from rl3d.models import Architecture
from rl3d.models.build import build_model, canonical_parameters


@dataclass
class Built:
    """An engine and what it was built from."""

    engine: TrainingEngine
    model: Any
    arch: Architecture
    groups: ModelGroups
    padded_vocab: int
    source: Path

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By canonical name."""
        return canonical_parameters(self.model, self.arch, self.groups)


def build_engine(runtime: Any, registry: GroupRegistry, source: Path, train: str, dtype: str = "float32",
                 model_options: dict[str, Any] | None = None, **adam: Any) -> Built:  # fmt: skip
    """The Hugging Face directory ``source`` at layout ``train``.

    ``model_options`` go to ``build_model``; ``adam`` changes the settings of tests.reference.
    """
    layout = TrainLayout.parse(train).resolve(runtime.world_size)
    arch, precision = Architecture.from_hf(source), getattr(torch, dtype)
    padded = arch.padded_vocab(4)
    groups = training_groups(Mesh.of(layout, runtime.world_size), registry, layout.vpp)
    model = build_model(arch, groups, padded_vocab=padded, dtype=precision, device=runtime.device, **(model_options or {}))
    import_hf(source, arch, padded, canonical_parameters(model, arch, groups), groups.tp_size, groups.tp_rank)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01, "max_grad_norm": 0.5, **adam}
    engine = TrainingEngine(model, arch, groups, stage=layout.zero, settings=AdamSettings(**settings), logprob_chunk=16)
    return Built(engine, model, arch, groups, padded, source)
