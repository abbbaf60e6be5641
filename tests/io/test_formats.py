"""What can be read: safetensors, PyTorch files, checkpoints of runs; and what is refused, in one clear line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rl3d.cli import main
from rl3d.io import CheckpointError
from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from rl3d.io.finite import all_finite
from tests.io.test_convert import same, tensors
from tests.models.zoo import save

SIDECARS = {
    "tokenizer.json": b'{"version": "1.0"}\r\n', "tokenizer.model": bytes(range(256)), "chat_template.jinja": b"{{ x }}\r\n",
    "special_tokens_map.json": b"{ }", "generation_config.json": b'{"eos_token_id":  2}', "vocab.json": b"{}",
}  # fmt: skip


@pytest.fixture(scope="module")
def safe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save(tmp_path_factory.mktemp("formats"), "qwen2-tied")
    for name, content in SIDECARS.items():
        (root / name).write_bytes(content)
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "rag.jinja").write_bytes(b"{{ y }}\r\n")
    return root


def as_bin(source: Path, target: Path, shards: int = 1, **save: Any) -> Path:
    """The weights in ``shards`` PyTorch files, with the index that transformers wrote for such."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    items = list(tensors(source).items())
    names = ["pytorch_model.bin"] if shards == 1 else [
        f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)
    ]  # fmt: skip
    for i, name in enumerate(names):
        torch.save(dict(items[i::shards]), target / name, **save)
    if shards > 1:
        weight_map = {key: names[n % shards] for n, (key, _) in enumerate(items)}
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def items(directory: Path) -> list[tuple[str, str]]:
    return [(i["name"], i["sha256"]) for i in json.loads((directory / "conversion.json").read_text())["items"]]


def test_pytorch_files_are_read_like_safetensors(safe: Path, tmp_path: Path) -> None:
    hf_to_megatron(safe, tmp_path / "right")
    kinds = {"one": {}, "three": {"shards": 3}, "old": {"_use_new_zipfile_serialization": False}}
    for name, how in kinds.items():
        source = as_bin(safe, tmp_path / name, **how)
        hf_to_megatron(source, tmp_path / f"{name}.m")
        assert items(tmp_path / f"{name}.m") == items(tmp_path / "right")
    assert main(["convert", "export", str(tmp_path / "three"), str(tmp_path / "back")]) == 0
    assert same(tensors(safe), tensors(tmp_path / "back"))
    assert main(["convert", "verify", str(tmp_path / "three"), str(tmp_path / "back")]) == 0


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_damaged_pytorch_files_are_refused(safe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = tensors(safe)
    key = "model.norm.weight"

    def refuse(message: str, content: Any) -> None:
        torch.save(content, source / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=message):
            hf_to_megatron(source, tmp_path / "m")
        assert not (tmp_path / "m").exists()

    source = as_bin(safe, tmp_path / "src")
    refuse("pytorch_model.bin cannot be read: its pickle asks for posix.system; refused", {**held, "x": Evil()})
    assert not (tmp_path / "ran").exists(), "code in the file was run"
    refuse("'step' is a int; expected a mapping of names to tensors", {**held, "step": 3})
    refuse("holds a list", [1])
    refuse(f"missing: {key}", {k: t for k, t in held.items() if k != key})
    refuse(rf"{key}: shape \(65,\), expected \(64,\)", {**held, key: torch.ones(65)})
    refuse(f"{key} has dtype torch.int64 in .*pytorch_model.bin", {**held, key: torch.ones(64, dtype=torch.int64)})
    refuse(f"{key} holds NaN or infinite values in .*pytorch_model.bin", {**held, key: torch.full((64,), torch.nan)})

    file = source / "pytorch_model.bin"
    torch.save(held, file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="pytorch_model.bin cannot be read"):
        hf_to_megatron(source, tmp_path / "m")
    listed = as_bin(safe, tmp_path / "listed", shards=2)
    index = json.loads((listed / "pytorch_model.bin.index.json").read_text())
    index["weight_map"][key] = "pytorch_model-00002-of-00001.bin"
    (listed / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lists files that do not exist: pytorch_model-00002-of-00001.bin"):
        hf_to_megatron(listed, tmp_path / "m")


def test_safetensors_come_before_pytorch_files(safe: Path, tmp_path: Path) -> None:
    both = as_bin(safe, tmp_path / "both")
    torch.save({"nothing": torch.zeros(1)}, both / "pytorch_model.bin")
    for file in safe.iterdir():
        if file.is_file():
            (both / file.name).write_bytes(file.read_bytes())
    hf_to_megatron(both, tmp_path / "m")


def test_sidecars_are_carried_byte_for_byte(safe: Path, tmp_path: Path) -> None:
    hf_to_megatron(safe, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    for name, content in SIDECARS.items():
        assert (tmp_path / "back" / name).read_bytes() == content
    assert (tmp_path / "back" / "additional_chat_templates" / "rag.jinja").read_bytes() == b"{{ y }}\r\n"
    assert (tmp_path / "back" / "config.json").read_bytes() == (safe / "config.json").read_bytes()


def test_a_checkpoint_of_a_run_is_a_source(safe: Path, tmp_path: Path) -> None:
    step = tmp_path / "step_000002"
    step.mkdir()
    (step / "state.json").write_text("{}")
    (step / "hf").symlink_to(safe)
    hf_to_megatron(step, tmp_path / "m")
    hf_to_megatron(safe, tmp_path / "right")
    assert items(tmp_path / "m") == items(tmp_path / "right")


@pytest.mark.parametrize("inside", ["mp_rank_00", "iter_0000005/mp_rank_00_000", "release/mp_rank_00"])
def test_legacy_megatron_directories_are_refused(tmp_path: Path, capsys: Any, inside: str) -> None:
    (tmp_path / "old" / inside).mkdir(parents=True)
    assert main(["convert", "export", str(tmp_path / "old"), str(tmp_path / "x")]) == 2
    assert "legacy Megatron checkpoint" in capsys.readouterr().err
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert main(["convert", "export", str(tmp_path / "zarr"), str(tmp_path / "x")]) == 2
    assert "sharded_backend 'zarr'; expected torch_dist" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_is_what_torch_says(dtype: torch.dtype) -> None:
    extremes = torch.tensor(
        [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny, 0.0, -0.0], dtype=dtype
    )
    value = torch.cat([torch.randn(70_000).to(dtype), extremes])
    assert all_finite(value) and all_finite(value[:70_000].view(700, 100)[:, 3:50])
    for bad in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 65_536, -1):
            broken = value.clone()
            broken[at] = bad
            assert not all_finite(broken)
        wide = value[:70_000].clone().view(700, 100)
        wide[699, 49] = bad
        assert all_finite(wide[:, :49]) and not all_finite(wide[:, :50])
    assert all_finite(value[:0])
