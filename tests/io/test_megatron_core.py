"""What the converter writes, loaded by megatron-core itself into its own modules at several layouts, and the way back."""

from pathlib import Path

import pytest
import torch

from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from tests.io.test_convert import same, tensors
from tests.models.zoo import EVERY, make, save
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PADDED = 256
LOADED = ["mistral", "qwen3", "mistral-tied"]  # plain RoPE, so that megatron-core's own modules compute them
LAYOUTS = [(2, 1), (1, 2), (1, 1)]
TOKENS = torch.randint(3, 253, (150,), generator=torch.Generator().manual_seed(5)).tolist()

EVERY.setdefault("mistral-tied", (EVERY["mistral"][0], {**EVERY["mistral"][1], "tie_word_embeddings": True}))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    for name in LOADED:
        save(root, name)
        hf_to_megatron(root / name, root / f"{name}.megatron", max_shard_size=200_000)
    arguments = {"directory": str(root), "names": LOADED, "layouts": LAYOUTS, "padded": PADDED, "tokens": TOKENS}
    run_ranks("tests.io.megatron_checks:main", 2, arguments, timeout=200)
    return root


@pytest.mark.parametrize("name", LOADED)
def test_megatron_core_loads_it_at_any_layout(loaded: Path, name: str) -> None:
    with torch.no_grad():
        right = make(name)(torch.tensor([TOKENS])).logits[0]
    right = torch.log_softmax(right.double(), -1)
    for tp, pp in LAYOUTS:
        found = torch.log_softmax(torch.load(loaded / f"{name}-tp{tp}-pp{pp}.pt").double(), -1)
        assert (found - right).abs().max() < 1e-5, (tp, pp)


@pytest.mark.parametrize("name", LOADED)
def test_what_megatron_core_saved_is_exported(loaded: Path, tmp_path: Path, name: str) -> None:
    megatron_to_hf(loaded / f"{name}.saved", tmp_path / "back", hf=loaded / name)
    assert same(tensors(loaded / name), tensors(tmp_path / "back"))
