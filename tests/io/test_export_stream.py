"""Files written tensor by tensor from a model that lives on."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from rl3d.io.export_hf import SafetensorsStream


def test_weights_stay_resizable_after_they_were_written(tmp_path: Path) -> None:
    """A switch may empty the storage of the weights; torch refuses that for memory that numpy shares."""
    flat = torch.randn(64)
    stream = SafetensorsStream(tmp_path / "x.safetensors", {"a": (4, 8), "b": (32,)}, torch.float32)
    right = {"a": flat[:32].view(4, 8).clone(), "b": flat[32:].clone()}
    stream.write("a", flat[:32].view(4, 8))
    stream.write("b", flat[32:])
    stream.close()
    flat.untyped_storage().resize_(0)
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], right[name]) for name in right)
