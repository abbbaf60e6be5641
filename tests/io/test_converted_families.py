"""Mixtures, latent attention and gemma, there and back bit for bit; stored fused or not; kept dtypes; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl3d.cli import main
from rl3d.io import CheckpointError
from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from rl3d.io.source import Source
from tests.io.test_convert import edited, same, tensors
from tests.models.zoo import CONVERTED, make

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def saved(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    make(name).to(dtype).save_pretrained(directory, max_shard_size="100KB")
    return directory


def in_memory(directory: Path, source: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """The model's state_dict as it is: experts of a layer in one tensor, under transformers' names."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    state = make(name).to(dtype).state_dict()
    if name == "qwen3_moe":  # tied
        state.pop("lm_head.weight")
    save_file({k: v.contiguous() for k, v in state.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_converted_family_there_and_back(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    source = saved(tmp_path / "hf", name, dtype)
    hf_to_megatron(source, tmp_path / "m", max_shard_size=150_000, jobs=2)
    megatron_to_hf(tmp_path / "m", tmp_path / "back", max_shard_size=150_000)
    back = tensors(tmp_path / "back")
    assert same(tensors(source), back)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in back.values())
    assert index["weight_map"].keys() == back.keys()
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_experts_in_one_tensor_are_the_same_model_and_written_one_by_one(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "hf", name)
    fused = in_memory(tmp_path / "fused", source, name)
    assert any(key.endswith("experts.gate_up_proj") for key in tensors(fused))
    hf_to_megatron(fused, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert same(tensors(source), tensors(tmp_path / "back"))


def test_both_forms_of_an_expert_are_one_too_many(tmp_path: Path) -> None:
    source = saved(tmp_path / "hf", "qwen3_moe")
    fused = in_memory(tmp_path / "fused", source, "qwen3_moe")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    both = edited(fused, tmp_path / "both", lambda t: t.update({name: tensors(source)[name]}))
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        hf_to_megatron(both, tmp_path / "m")
    cut = edited(
        fused, tmp_path / "cut", lambda t: t.update({k: v[:, :-1] for k, v in t.items() if k.endswith("gate_up_proj")})
    )
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj: shape \(4, 63, 64\), expected \(4, 64, 64\)"):
        hf_to_megatron(cut, tmp_path / "m")


def test_a_tied_head_beside_fused_experts_is_compared(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    fused = in_memory(tmp_path / "fused", saved(tmp_path / "hf", "qwen3_moe"), "qwen3_moe")
    other = edited(fused, tmp_path / "other", lambda t: t.update({"lm_head.weight": t[name].flip(0)}))
    with pytest.raises(CheckpointError, match=f"lm_head.weight differs from {name}"):
        hf_to_megatron(other, tmp_path / "m")


def test_the_correction_of_scores_keeps_its_precision(tmp_path: Path) -> None:
    """Megatron-LM pull request 81 of ISEEKYAN: biases closer than bf16 can tell choose other experts once rounded."""
    close = torch.tensor([0.5, 0.5001, 0.50005, 0.49995, 0.50015, 0.4999, 0.5002, 0.49985] * 2)
    assert close.bfloat16().unique().numel() < close.unique().numel()
    hub = edited(saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16), tmp_path / "hub", lambda t: t.update({BIAS: close}))
    hf_to_megatron(hub, tmp_path / "m")  # one dtype beside the other is no fault here
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert same(tensors(hub), tensors(tmp_path / "back"))
    whole = edited(saved(tmp_path / "hf32", "deepseek_v3"), tmp_path / "hub32", lambda t: t.update({BIAS: close}))
    hf_to_megatron(whole, tmp_path / "m16", dtype="bfloat16")
    megatron_to_hf(tmp_path / "m16", tmp_path / "back16")
    found = tensors(tmp_path / "back16")
    assert torch.equal(found[BIAS], close)
    assert {v.dtype for k, v in found.items() if k.split("gate.")[-1] not in ("weight", "e_score_correction_bias")} == {
        torch.bfloat16
    }


def test_another_tensor_of_another_dtype_is_still_refused(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.experts.0.up_proj.weight"
    source = edited(
        saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16), tmp_path / "x", lambda t: t.update({key: t[key].float()})
    )
    with pytest.raises(CheckpointError, match=f"{key} has dtype torch.float32"):
        hf_to_megatron(source, tmp_path / "m")


EXPERT = "model.layers.3.mlp.experts.2.{}_proj.weight"
DAMAGE: dict[str, tuple[Any, str]] = {
    "delete": (lambda t: t.pop(EXPERT.format("down")), f"missing: {EXPERT.format('down')}"),
    "one expert more": (
        lambda t: t.update({EXPERT.format("up").replace("2", "16"): t[EXPERT.format("up")].clone()}),
        f"unexpected: {EXPERT.format('up').replace('2', '16')}",
    ),
    "renamed as in VERL issue 2319": (
        lambda t: t.update({"model.layers.3.mlp.experts.up_proj.weight2": t.pop(EXPERT.format("up"))}),
        f"missing: {EXPERT.format('up')}; unexpected: model.layers.3.mlp.experts.up_proj.weight2",
    ),
    "transposed": (
        lambda t: t.update({EXPERT.format("up"): t[EXPERT.format("up")].T}),
        rf"{EXPERT.format('up')}: shape \(64, 32\), expected \(32, 64\)",
    ),
    "no bias": (lambda t: t.pop(BIAS), f"missing: {BIAS}"),
    "nan": (lambda t: t[BIAS][3:4].fill_(float("nan")), f"{BIAS} holds NaN"),
    "a layer that predicts further tokens": (
        lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}),
        "unexpected: model.layers.4.eh_proj.weight",
    ),
}


def test_damaged_mixtures_are_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    whole = saved(tmp_path / "hf", "deepseek_v3")
    for number, (edit, message) in enumerate(DAMAGE.values()):
        source = edited(whole, tmp_path / str(number), edit)
        with pytest.raises(CheckpointError, match=message):
            hf_to_megatron(source, tmp_path / "m")
        assert not (tmp_path / "m").exists()
    assert main(["convert", "import", str(tmp_path / "0"), str(tmp_path / "m")]) == 2
    assert EXPERT.format("down") in capsys.readouterr().err


def test_swapped_experts_and_square_transposes_are_noticed(tmp_path: Path, capsys: Any) -> None:
    source = saved(tmp_path / "hf", "mixtral")  # hidden == an expert's size
    hf_to_megatron(source, tmp_path / "m")
    a, b = (f"model.layers.2.block_sparse_moe.experts.{e}.w3.weight" for e in (0, 3))

    def swap(t: dict[str, torch.Tensor]) -> None:
        t[a], t[b] = t[b], t[a]

    assert main(["convert", "verify", str(edited(source, tmp_path / "s", swap)), str(tmp_path / "m")]) == 1
    err = capsys.readouterr().err
    assert err.count("differs:") == 2 and a in err and "local_experts.3.linear_fc1" in err
    turned = edited(source, tmp_path / "t", lambda t: t.update({a: t[a].T}))
    assert main(["convert", "verify", str(turned), str(tmp_path / "m")]) == 1
    assert main(["convert", "verify", str(source), str(tmp_path / "m")]) == 0


def test_dtypes_and_shapes_are_those_of_the_source(tmp_path: Path) -> None:
    source = Source(saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16))
    held = {m.spec.name: m for m in source.parameters}
    bias = held["decoder.layers.2.mlp.router.expert_bias"]
    assert bias.keeps_dtype and source.dtype_of(bias) == torch.bfloat16 == source.dtype
    assert source.read(bias).shape == (16,)


def test_families_says_what_is_trained(capsys: Any) -> None:
    assert main(["convert", "families"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "trained" in lines["llama"] and "soft caps" in lines["gemma2"] and "latent attention" in lines["deepseek_v3"]
