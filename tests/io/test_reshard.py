"""Megatron checkpoints cut for a layout: pieces are plain slices, each rank's in its own files; any layout reads them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl3d.cli import main
from rl3d.io.convert import hf_to_megatron, megatron_to_hf, reshard
from rl3d.io.torch_dist import TorchDistReader
from rl3d.layout import LayoutError
from tests.io.test_convert import same, tensors
from tests.models.zoo import make, save


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("reshard"), "qwen2")


def pieces(directory: Path) -> dict[tuple[str, tuple[int, ...]], tuple[int, torch.Tensor]]:
    """(stored tensor, offsets) -> (rank whose file holds it, values), read with torch.load from the recorded places."""
    reader = TorchDistReader(directory)
    out = {}
    for index, info in reader._storage.items():
        with (directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            scratch = directory.parent / "piece.pt"
            scratch.write_bytes(file.read(info.length))
        out[index.fqn, tuple(index.offset)] = int(info.relative_path.split("_")[2]), torch.load(scratch)
    return out


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 3), (1, 4)])
def test_pieces_are_plain_slices(source: Path, tmp_path: Path, tp: int, pp: int) -> None:
    hf_to_megatron(source, tmp_path / "m", tp=tp, pp=pp, max_shard_size=60_000)
    held = pieces(tmp_path / "m")
    w = make("qwen2").state_dict()
    stages = [layer for layers in torch.arange(4).tensor_split(pp) for layer in [layers.tolist()]]  # uneven for 3
    for layer in range(4):
        stage = next(s for s, layers in enumerate(stages) if layer in layers)
        head = f"model.layers.{layer}."
        gate, up, down = (w[f"{head}mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        norm = w[f"{head}input_layernorm.weight"]
        name = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
        rank, value = held[name, (layer, 0)]
        assert rank == stage * tp and torch.equal(value[0], norm)
        for slot in range(tp):
            rank, value = held["decoder.layers.mlp.linear_fc2.weight", (layer, 0, slot * 96 // tp)]
            assert rank == stage * tp + slot and torch.equal(value[0], down.chunk(tp, 1)[slot])
            if tp == 1:
                continue
            for block, matrix in ((0, gate), (96, up)):  # gate and up are cut apart
                rank, value = held["decoder.layers.mlp.linear_fc1.weight", (layer, block + slot * 96 // tp, 0)]
                assert rank == stage * tp + slot and torch.equal(value[0], matrix.chunk(tp)[slot])
    rank, value = held["output_layer.weight", (128 * (tp > 1), 0) if tp < 4 else (64, 0)]
    assert rank == (pp - 1) * tp + (tp > 1)


def test_any_cut_comes_back_the_same(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "a", tp=4, pp=2)
    reshard(tmp_path / "a", tmp_path / "b", tp=2, pp=4, jobs=3)
    reshard(tmp_path / "b", tmp_path / "c")
    hf_to_megatron(source, tmp_path / "right")
    found, right = (
        {p.name: p.read_bytes() for p in (tmp_path / n).iterdir() if p.suffix == ".distcp"} for n in ("c", "right")
    )
    assert found == right
    megatron_to_hf(tmp_path / "b", tmp_path / "back")
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert main(["convert", "verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["convert", "verify", str(tmp_path / "b")]) == 0


def test_weights_of_a_run_are_cut_for_another_layout(source: Path, tmp_path: Path) -> None:
    step = tmp_path / "step_000003"
    step.mkdir()
    (step / "state.json").write_text("{}")
    (step / "hf").symlink_to(source)
    assert main(["convert", "reshard", str(step), str(tmp_path / "b"), "--tp", "2", "--pp", "2"]) == 0
    megatron_to_hf(tmp_path / "b", tmp_path / "back")
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert {p.name for p in (tmp_path / "b").glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(4)}


def test_layouts_that_cannot_be_are_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    hf_to_megatron(source, tmp_path / "a")
    with pytest.raises(LayoutError, match="does not divide by tp = 5"):
        reshard(tmp_path / "a", tmp_path / "b", tp=5)
    with pytest.raises(LayoutError, match="4 layers do not fill pp = 5 stages"):
        reshard(tmp_path / "a", tmp_path / "b", pp=5)
    with pytest.raises(LayoutError, match="0 experts do not divide by ep = 2"):
        reshard(tmp_path / "a", tmp_path / "b", ep=2)
    assert main(["convert", "reshard", str(source), str(tmp_path / "b")]) == 2
    assert "did you mean `import`" in capsys.readouterr().err
    words = ["convert", "reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2", "--pp", "2", "--dry-run"]
    assert main(words) == 0 and "__3_0.distcp" in capsys.readouterr().out
    assert not (tmp_path / "b").exists()
