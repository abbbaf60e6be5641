"""Export refuses every kind of damage to a ``torch_dist`` directory, names what is wrong, and leaves nothing behind."""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl3d.cli import main
from rl3d.io import CheckpointError
from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from tests.models.zoo import save

FC2 = "decoder.layers.mlp.linear_fc2.weight"  # [4, 64, 96]
KEY = MetadataIndex(FC2, torch.Size([2, 0, 0]))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    hf_to_megatron(save(root, "mistral"), root / "m", max_shard_size=150_000)
    return root / "m"


def meta_of(directory: Path) -> Any:
    return pickle.loads((directory / ".metadata").read_bytes())


def metadata(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of the file that says which tensors there are and where."""

    def change(directory: Path) -> None:
        found = meta_of(directory)
        edit(found)
        (directory / ".metadata").write_bytes(pickle.dumps(found))

    return change


def value(edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """A change of the values of layer 2, in place; the same number of bytes."""

    def change(directory: Path) -> None:
        info = meta_of(directory).storage_data[KEY]
        scratch = directory / "scratch"
        with (directory / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            scratch.write_bytes(file.read(info.length))
            torch.save(edit(torch.load(scratch)), scratch)
            content = scratch.read_bytes()
            assert len(content) <= info.length
            file.seek(info.offset)
            file.write(content)
        scratch.unlink()

    return change


def truncate(directory: Path) -> None:
    info = meta_of(directory).storage_data[KEY]
    os.truncate(directory / info.relative_path, info.offset + info.length - 10)


def lose_file(directory: Path) -> None:
    (directory / meta_of(directory).storage_data[KEY].relative_path).unlink()


def scribble(directory: Path) -> None:
    info = meta_of(directory).storage_data[KEY]
    with (directory / info.relative_path).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"not what torch.save wrote")


def retype(found: Any) -> None:
    tensor = found.state_dict_metadata[FC2]
    tensor.properties = replace(tensor.properties, dtype=torch.int32)


def grow(found: Any) -> None:
    found.state_dict_metadata[FC2].size = torch.Size([4, 64, 97])


def rename(found: Any) -> None:
    found.state_dict_metadata[FC2 + "s"] = found.state_dict_metadata.pop(FC2)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "delete": (metadata(lambda m: m.state_dict_metadata.pop(FC2)), "missing: decoder.layers.0.mlp.linear_fc2.weight"),
    "rename": (metadata(rename), f"missing: decoder.layers.0.mlp.linear_fc2.weight.*unexpected: {FC2}s"),
    "add": (metadata(lambda m: m.state_dict_metadata.update(more=m.state_dict_metadata[FC2])), "unexpected: more"),
    "shape": (metadata(grow), rf"{FC2}: shape \(4, 64, 97\), expected \(4, 64, 96\)"),
    "type": (metadata(retype), f"{FC2} has dtype torch.int32"),
    "lost piece": (metadata(lambda m: m.state_dict_metadata[FC2].chunks.pop()), f"{FC2}: its pieces hold 18432 of 24576"),
    "piece without data": (metadata(lambda m: m.storage_data.pop(KEY)), f"{FC2}: no data for the piece at \\(2, 0, 0\\)"),
    "truncated": (truncate, f"{FC2}: __0_.*ends at byte"),
    "lost file": (lose_file, f"{FC2}: __0_.*does not exist"),
    "scribbled": (scribble, f"{FC2} in .* at byte .* cannot be read"),
    "transposed": (value(lambda t: t.transpose(1, 2).contiguous()), f"{FC2} in .*: found .*96, 64.*expected .*64, 96"),
    "retyped values": (value(lambda t: t.view(torch.int32)), f"{FC2} in .*: found .*int32.*expected .*float32"),
    "nan": (value(lambda t: t.index_fill(2, torch.tensor(5), torch.nan)), f"2.mlp.linear_fc2.weight holds NaN.*{FC2}"),
    "metadata cut": (lambda d: os.truncate(d / ".metadata", 100), ".metadata cannot be read"),
    "metadata that runs code": (
        lambda d: (d / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.") and None, "asks for posix.system"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name(
    good: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = DAMAGE[kind]
    source = tmp_path / "m"
    shutil.copytree(good, source)
    change(source)
    with pytest.raises(CheckpointError, match=message):
        megatron_to_hf(source, tmp_path / "hf")
    assert main(["convert", "export", str(source), str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert os.listdir(tmp_path) == ["m"], "nothing is left behind"


def test_a_swap_that_fits_is_seen_by_the_recorded_fingerprints(good: Path, tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "m"
    shutil.copytree(good, source)

    def swap(found: Any) -> None:
        places, other = found.storage_data, MetadataIndex(FC2, torch.Size([3, 0, 0]))
        places[KEY], places[other] = places[other], places[KEY]

    metadata(swap)(source)
    assert main(["convert", "verify", str(source)]) == 1
    err = capsys.readouterr().err
    assert err.count("differs:") == 2 and "layers.2.mlp.linear_fc2.weight" in err and "layers.3.mlp.down_proj" in err
