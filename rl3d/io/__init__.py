"""Checkpoint formats: reading slices of and writing Hugging Face directories."""

from rl3d.io.export_hf import export_hf
from rl3d.io.export_megatron import export_megatron
from rl3d.io.hf_reader import CheckpointError, HFReader
from rl3d.io.import_hf import import_hf
from rl3d.io.random_reader import write_random_model

__all__ = ["CheckpointError", "HFReader", "export_hf", "export_megatron", "import_hf", "write_random_model"]
