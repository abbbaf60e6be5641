"""HF -> Megatron -> HF: bit for bit, read by megatron-core itself, and never wrong quietly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl3d.cli import main
from rl3d.io import CheckpointError
from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from rl3d.io.stream import ConvertError, partial_directory
from tests.models.zoo import MODELS, make, save


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    for name in MODELS:
        save(root, name)
        (root / name / "tokenizer.model").write_bytes(bytes(range(256)))
        (root / name / "chat_template.jinja").write_text("{{ x }}\r\n")
    return root


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = load_file(file)
        assert not out.keys() & found.keys()
        out |= found
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_there_and_back(root: Path, tmp_path: Path, name: str, dtype: str) -> None:
    source = root / name
    if dtype == "bfloat16":
        source = tmp_path / "bf16"
        make(name).to(torch.bfloat16).save_pretrained(source)
    hf_to_megatron(source, tmp_path / "m", max_shard_size=150_000, jobs=2)
    megatron_to_hf(tmp_path / "m", tmp_path / "back", max_shard_size=150_000)
    assert same(tensors(source), tensors(tmp_path / "back"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    back = tensors(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in back.values())
    assert {n: load_file(tmp_path / "back" / f).keys() >= {n} for n, f in index["weight_map"].items()} == dict.fromkeys(
        back, True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.dtype == getattr(torch, dtype)
    sidecars = {p.name: p.read_bytes() for p in source.iterdir() if not p.name.startswith("model")}
    assert {p: (tmp_path / "back" / p).read_bytes() for p in sidecars} == sidecars
    assert main(["convert", "verify", str(source), str(tmp_path / "m")]) == 0
    assert main(["convert", "verify", str(tmp_path / "back")]) == 0


def edited(source: Path, target: Path, edit: Any) -> Path:
    """A copy in one file, its tensors changed by ``edit``."""
    target.mkdir()
    found = tensors(source)
    edit(found)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({k: t.contiguous() for k, t in found.items()}, target / "model.safetensors", {"format": "pt"})
    return target


KEY = "model.layers.1.mlp.down_proj.weight"
REFUSED = {
    "delete": (lambda t: t.pop(KEY), f"missing: {KEY}"),
    "add": (lambda t: t.update(more=torch.zeros(3)), "unexpected: more"),
    "reshape": (lambda t: t.update({KEY: t[KEY].reshape(32, -1)}), rf"{KEY}: shape \(32, 192\), expected \(64, 96\)"),
    "transpose": (lambda t: t.update({KEY: t[KEY].T}), rf"{KEY}: shape \(96, 64\), expected \(64, 96\)"),
    "retype": (lambda t: t.update({KEY: t[KEY].bfloat16()}), f"{KEY} has dtype torch.bfloat16"),
    "integers": (lambda t: t.update({KEY: t[KEY].int()}), f"{KEY} has dtype I32 in .*model.safetensors"),
    "rename": (lambda t: t.update({KEY + "s": t.pop(KEY)}), f"missing: {KEY}; unexpected: {KEY}s"),
    "nan": (lambda t: t[KEY].view(-1)[5:6].fill_(float("nan")), f"{KEY} holds NaN or infinite values in .*safetensors"),
    "infinity": (lambda t: t[KEY].view(-1)[-1:].fill_(float("inf")), f"{KEY} holds NaN or infinite values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_damage_is_refused_by_name(root: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    edit, message = REFUSED[kind]
    source = edited(root / "mistral", tmp_path / "src", edit)
    with pytest.raises(CheckpointError, match=message):
        hf_to_megatron(source, tmp_path / "m")
    assert main(["convert", "import", str(source), str(tmp_path / "m")]) == 2
    assert KEY in capsys.readouterr().err or kind == "add"
    assert os.listdir(tmp_path) == ["src"], "nothing is left behind"


def test_damaged_files_and_indices_are_refused(root: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in (root / "mistral").iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    def refuse(source: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            hf_to_megatron(source, tmp_path / "m")
        assert not (tmp_path / "m").exists()

    shard = "model-00002-of-"
    cut = copy("cut")
    file = next(cut.glob(shard + "*"))
    file.write_bytes(file.read_bytes()[:-4])
    refuse(cut, f"{file.name} cannot be read")

    index_file = "model.safetensors.index.json"
    lists = copy("lists")
    index = json.loads((lists / index_file).read_text())
    moved = next(n for n, f in index["weight_map"].items() if f.startswith(shard))
    other = next(f for f in index["weight_map"].values() if not f.startswith(shard))
    (lists / index_file).write_text(json.dumps({"weight_map": {**index["weight_map"], moved: other}}))
    refuse(lists, f"{moved} in .*where the index does not place it|places '{moved}' in {other}, but it is not there")

    listed = copy("listed")
    text = (listed / index_file).read_text()
    entry = f'"{moved}": "{index["weight_map"][moved]}",'
    (listed / index_file).write_text(text.replace(entry, f'{entry} "{moved}": "{other}",'))
    refuse(listed, f"{moved}.* is listed twice")

    twice = copy("twice")
    held = load_file(twice / other)
    save_file({**held, moved: torch.zeros(1)}, twice / other)
    refuse(twice, f"unexpected: {moved} in {other}")

    stray = copy("stray")
    save_file({"x": torch.zeros(1)}, stray / "model-00099-of-00099.safetensors")
    refuse(stray, "unexpected file model-00099-of-00099.safetensors")
    save_file({"x": torch.zeros(1)}, stray / "model.safetensors")
    refuse(stray, "has both")


def test_a_tied_head_that_differs_is_refused(root: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    equal = edited(root / "llama3", tmp_path / "equal", lambda t: t.update({"lm_head.weight": t[name].clone()}))
    hf_to_megatron(equal, tmp_path / "m")
    other = edited(root / "llama3", tmp_path / "other", lambda t: t.update({"lm_head.weight": t[name].flip(0)}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf_to_megatron(other, tmp_path / "n")


def test_verify_catches_what_shapes_cannot(root: Path, tmp_path: Path, capsys: Any) -> None:
    source = root / "llama-mqa"  # its MLP is square
    hf_to_megatron(source, tmp_path / "m")

    def swap(t: dict[str, torch.Tensor]) -> None:
        a, b = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2))
        t[a], t[b] = t[b], t[a]

    changed = edited(source, tmp_path / "swapped", swap)
    assert main(["convert", "verify", str(changed), str(tmp_path / "m")]) == 1
    err = capsys.readouterr().err
    assert err.count("differs:") == 2 and "decoder.layers.2.mlp.linear_fc1.weight" in err and "layers.0.mlp.up_proj" in err
    turned = edited(source, tmp_path / "turned", lambda t: t.update({KEY: t[KEY].T}))
    assert main(["convert", "verify", str(turned), str(tmp_path / "m")]) == 1
    assert KEY in capsys.readouterr().err


def test_verify_compares_with_what_was_recorded(root: Path, tmp_path: Path, capsys: Any) -> None:
    hf_to_megatron(root / "llama-mqa", tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert main(["convert", "verify", str(tmp_path / "back")]) == 0
    held = load_file(tmp_path / "back" / "model.safetensors")
    save_file({**held, KEY: held[KEY].T.contiguous()}, tmp_path / "back" / "model.safetensors", {"format": "pt"})
    assert main(["convert", "verify", str(tmp_path / "back")]) == 1
    assert KEY in capsys.readouterr().err


def test_a_configuration_that_no_rule_reads_is_refused(root: Path, tmp_path: Path, capsys: Any) -> None:
    source = edited(root / "mistral", tmp_path / "src", lambda t: None)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": 50.0}))
    assert main(["convert", "import", str(source), str(tmp_path / "m")]) == 2
    assert "attn_logit_softcapping = 50.0" in capsys.readouterr().err


def test_dtype_is_changed_only_when_asked(root: Path, tmp_path: Path) -> None:
    hf_to_megatron(root / "qwen2", tmp_path / "m", dtype="bfloat16")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    expected = {k: t.bfloat16() for k, t in tensors(root / "qwen2").items()}
    assert same(expected, tensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    large = edited(root / "qwen2", tmp_path / "large", lambda t: t[KEY].view(-1)[:1].fill_(1e6))
    with pytest.raises(CheckpointError, match=f"{KEY} in .* holds values up to 1e\\+06"):
        hf_to_megatron(large, tmp_path / "n", dtype="float16")


def test_a_stopped_conversion_is_taken_up_and_ends_in_the_same_bytes(root: Path, tmp_path: Path) -> None:
    def contents(directory: Path) -> dict[str, bytes]:
        return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}

    class Killed(BaseException):
        pass

    size = {"max_shard_size": 200_000}
    hf_to_megatron(root / "phi3", tmp_path / "whole", **size)
    for after in (1, 40_000, 300_000):
        target = tmp_path / f"m{after}"

        def stop(done: int, total: int, seconds: float, after: int = after) -> None:
            if done >= after:
                raise Killed

        with pytest.raises(Killed):
            hf_to_megatron(root / "phi3", target, show=stop, **size)
        assert not target.exists()
        half = next(partial_directory(target).glob("__0_0.distcp"))
        with half.open("ab") as file:
            file.write(b"torn")  # what was being written
        with pytest.raises(ConvertError, match="another conversion"):
            hf_to_megatron(root / "phi3", target, resume=True, dtype="bfloat16", **size)
        written: list[int] = []
        hf_to_megatron(root / "phi3", target, resume=True, show=lambda done, *_, w=written: w.append(done), **size)
        assert written[0] > 0 or after == 1, "nothing was taken up"
        assert contents(target) == contents(tmp_path / "whole")
        assert not partial_directory(target).exists()


def test_nothing_is_overwritten_unless_asked(root: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["convert", "import", str(root / "mistral"), str(tmp_path / "m")]
    assert main([*words, "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())
    assert main(words) == 0
    assert main(words) == 2 and "--overwrite" in capsys.readouterr().err
    (tmp_path / "m" / "old").write_text("")
    assert main([*words, "--overwrite"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"] and not (tmp_path / "m" / "old").exists()
    assert main(["convert", "export", str(root / "mistral"), str(tmp_path / "x")]) == 2
    assert "did you mean `import`" in capsys.readouterr().err


def test_torch_reads_the_stacked_layers(root: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    hf_to_megatron(root / "mistral", tmp_path / "m", max_shard_size=100_000)
    right = make("mistral").state_dict()
    norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    state = {"decoder.layers.mlp.linear_fc2.weight": torch.empty(4, 64, 96), norm: torch.empty(4, 64),
             "embedding.word_embeddings.weight": torch.full((256, 64), float("nan"))}  # fmt: skip
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "m"), no_dist=True)
    for layer in range(4):
        head = f"model.layers.{layer}."
        assert torch.equal(state["decoder.layers.mlp.linear_fc2.weight"][layer], right[head + "mlp.down_proj.weight"])
        assert torch.equal(state[norm][layer], right[head + "post_attention_layernorm.weight"])
    assert torch.equal(state["embedding.word_embeddings.weight"][:253], right["model.embed_tokens.weight"])
    assert state["embedding.word_embeddings.weight"][253:].eq(0).all()
