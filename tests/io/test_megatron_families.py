"""Weights of converted families compute in megatron-core's modules what transformers computes from the files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from tests.io.test_convert import same, tensors
from tests.models.zoo import CONVERTED, make, save
from tests.ranks import run_ranks

PADDED = 256
TOKENS = torch.randint(3, 253, (150,), generator=torch.Generator().manual_seed(5)).tolist()  # original RoPE lengths are 32
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]  # tp, pp, ep


def computed(root: Path, layouts: list[tuple[int, int, int]], ranks: int) -> Path:
    for name in CONVERTED:
        save(root, name)
        hf_to_megatron(root / name, root / f"{name}.megatron", max_shard_size=200_000)
    arguments = {"directory": str(root), "names": list(CONVERTED), "layouts": layouts, "padded": PADDED, "tokens": TOKENS}
    run_ranks("tests.io.family_checks:main", ranks, arguments, timeout=300)
    return root


def compare(root: Path, name: str, layout: tuple[int, int, int]) -> None:
    with torch.no_grad():
        right = torch.log_softmax(make(name)(torch.tensor([TOKENS])).logits[0].double(), -1)
    assert right.max(-1).values.exp().mean() > 0.03, "the model is nearly uniform and would hide faults"
    found = torch.log_softmax(torch.load(root / f"{name}-{'-'.join(map(str, layout))}.pt").double(), -1)
    assert (found - right).abs().max() < 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed(tmp_path_factory.mktemp("alone"), [(1, 1, 1)], 1)


@pytest.mark.parametrize("name", CONVERTED)
def test_logits_equal_transformers(alone: Path, name: str) -> None:
    compare(alone, name, (1, 1, 1))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed(tmp_path_factory.mktemp("cut"), LAYOUTS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_layouts_load_the_same_files(cut: Path, name: str, layout: Any) -> None:
    if layout[2] > 1 and not (cut / f"{name}-1-1-2.pt").exists():
        assert name.startswith("gemma"), "a mixture was left out"
        return
    compare(cut, name, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("saved", ["2-1", "1-2"])
def test_what_megatron_core_saved_is_exported(cut: Path, tmp_path: Path, name: str, saved: str) -> None:
    source = cut / f"{name}-{saved}.saved"
    if not source.exists():
        assert saved == "1-2" and name.startswith("gemma"), "a mixture was left out"
        return
    megatron_to_hf(source, tmp_path / "back", hf=cut / name)
    assert same(tensors(cut / name), tensors(tmp_path / "back"))
