"""What import writes for the ranks of a layout, compared with plain tensor arithmetic that knows nothing of rl3d's rules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rl3d.io.convert import hf_to_megatron
from rl3d.layout import LayoutError
from tests.io.test_convert import tensors
from tests.models.zoo import EVERY, make

PADDED = 256
# tp, pp, ep: even and uneven stages (4 layers over 3 are 2, 1, 1), more ranks than KV heads
LAYOUTS = [(8, 1, 1), (2, 3, 2)]
MORE = [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 2), (4, 2, 2)]
STAGES = {1: [0, 0, 0, 0], 2: [0, 0, 1, 1], 3: [0, 0, 1, 2], 4: [0, 1, 2, 3]}
FULL, COLUMN, ROW = "full", "column", "row"
Blocks = tuple[str, list[torch.Tensor]]  # how it is cut, and the blocks that are cut one by one


def layer_of(t: dict[str, torch.Tensor], config: Any, i: int) -> dict[str, Blocks]:
    """Megatron name within the layer -> its blocks, from Hugging Face tensors."""
    has, get = (lambda n: f"model.layers.{i}.{n}" in t), (lambda n: t[f"model.layers.{i}.{n}"])
    out: dict[str, Blocks] = {}

    def gated(name: str, gate: str, up: str, down: str) -> None:
        out[f"{name}linear_fc1.weight"] = (COLUMN, [get(gate), get(up)])
        out[f"{name}linear_fc2.weight"] = (ROW, [get(down)])

    out["self_attention.linear_proj.weight"] = (ROW, [get("self_attn.o_proj.weight")])
    if has("self_attn.kv_b_proj.weight"):
        pairs = {
            "kv_down": "kv_a_proj_with_mqa",
            "kv_up": "kv_b_proj",
            "q_down": "q_a_proj",
            "q_up": "q_b_proj",
            "q": "q_proj",
        }
        for ours, theirs in pairs.items():
            if has(f"self_attn.{theirs}.weight"):
                cut = FULL if "down" in ours else COLUMN
                out[f"self_attention.linear_{ours}_proj.weight"] = (cut, [get(f"self_attn.{theirs}.weight")])
        for x in ("q", "kv"):
            if has(f"self_attn.{x}_a_layernorm.weight"):
                out[f"self_attention.{x}_layernorm.weight"] = (FULL, [get(f"self_attn.{x}_a_layernorm.weight")])
    else:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        for kind in ("weight", "bias"):
            if has(f"self_attn.qkv_proj.{kind}"):
                q, k, v = get(f"self_attn.qkv_proj.{kind}").split([heads * size, groups * size, groups * size])
            elif has(f"self_attn.q_proj.{kind}"):
                q, k, v = (get(f"self_attn.{x}_proj.{kind}") for x in "qkv")
            else:
                continue
            by_group = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
            out[f"self_attention.linear_qkv.{kind}"] = (COLUMN, [torch.cat(by_group, 1).flatten(0, 1)])
        for x in "qk":
            if has(f"self_attn.{x}_norm.weight"):
                out[f"self_attention.{x}_layernorm.weight"] = (FULL, [get(f"self_attn.{x}_norm.weight")])
    if has("mlp.down_proj.weight"):
        if has("mlp.gate_up_proj.weight"):
            out["mlp.linear_fc1.weight"] = (COLUMN, list(get("mlp.gate_up_proj.weight").chunk(2)))
            out["mlp.linear_fc2.weight"] = (ROW, [get("mlp.down_proj.weight")])
        else:
            gated("mlp.", *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")))
    moe = "block_sparse_moe" if has("block_sparse_moe.gate.weight") else "mlp"
    if has(f"{moe}.gate.weight"):
        out["mlp.router.weight"] = (FULL, [get(f"{moe}.gate.weight")])
        names = ("w1", "w3", "w2") if moe != "mlp" else ("gate_proj", "up_proj", "down_proj")
        e = 0
        while has(f"{moe}.experts.{e}.{names[0]}.weight"):
            gated(f"mlp.experts.experts.{e}.", *(f"{moe}.experts.{e}.{x}.weight" for x in names))
            e += 1
        for shared in ("shared_expert", "shared_experts"):
            if has(f"mlp.{shared}.up_proj.weight"):
                gated("mlp.shared_experts.", *(f"mlp.{shared}.{x}_proj.weight" for x in ("gate", "up", "down")))
        if has("mlp.shared_expert_gate.weight"):
            out["mlp.shared_experts.gate_weight"] = (FULL, [get("mlp.shared_expert_gate.weight")])
        if has("mlp.gate.e_score_correction_bias"):
            out["mlp.router.expert_bias"] = (FULL, [get("mlp.gate.e_score_correction_bias")])
    return out


def expected(t: dict[str, torch.Tensor], config: Any, layout: tuple[int, int, int]) -> dict[tuple[str, int], torch.Tensor]:
    """(name with layer and expert, rank) -> that rank's shard."""
    tp, pp, ep = layout
    out: dict[tuple[str, int], torch.Tensor] = {}

    def put(name: str, first: int, cut: str, blocks: list[torch.Tensor]) -> None:
        if cut == FULL:
            out[name, first] = blocks[0]
            return
        axis = 0 if cut == COLUMN else 1
        for r in range(tp):
            out[name, first + r] = torch.cat([b.chunk(tp, axis)[r] for b in blocks], axis)

    rows = torch.zeros(PADDED - config.vocab_size, config.hidden_size)
    put("embedding.word_embeddings.weight", 0, COLUMN, [torch.cat([t["model.embed_tokens.weight"], rows])])
    if "lm_head.weight" in t:
        put("output_layer.weight", (pp - 1) * ep * tp, COLUMN, [torch.cat([t["lm_head.weight"], rows])])
    for i in range(config.num_hidden_layers):
        for name, (cut, blocks) in layer_of(t, config, i).items():
            expert, count = 0, 1
            if ".experts.experts." in name:
                expert, count = int(name.split(".")[3]), getattr(config, "num_experts", 0) or config.num_local_experts
            put(f"decoder.layers.{i}.{name}", (STAGES[pp][i] * ep + expert * ep // count) * tp, cut, blocks)
    return out


def written(directory: Path) -> dict[tuple[str, int], torch.Tensor]:
    """(name with layer and expert, rank) -> what the rank's files hold, pieces put together by their offsets."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    parts: dict[tuple[str, int], list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    for index, place in metadata.storage_data.items():
        with (directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            path = directory.parent / "piece"
            path.write_bytes(file.read(place.length))
        value, offsets, name = torch.load(path), tuple(index.offset), index.fqn
        head = "decoder.layers."
        if name.startswith(head) and not name.removeprefix(head)[0].isdigit():
            name, offsets, value = name.replace(head, f"{head}{offsets[0]}."), offsets[1:], value[0]
        if ".experts.experts." in name:
            name = name.replace(".experts.experts.", f".experts.experts.{offsets[0]}.")
            offsets, value = offsets[1:], value[0]
        parts.setdefault((name, int(place.relative_path.split("_")[2])), []).append((offsets, value))
    out = {}
    for key, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        axis = 1 if pieces[0][1].ndim == 2 and pieces[0][0][1] != pieces[-1][0][1] else 0
        out[key] = torch.cat([value for _, value in pieces], axis)
    return out


@pytest.mark.parametrize("name", EVERY)
def test_slices_are_plain_arithmetic(tmp_path: Path, name: str) -> None:
    check_slices(tmp_path, name, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_slices_of_more_layouts(tmp_path: Path, name: str) -> None:
    check_slices(tmp_path, name, MORE)


def check_slices(tmp_path: Path, name: str, layouts: list[tuple[int, int, int]]) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "hf")
    held, config = tensors(tmp_path / "hf"), model.config
    mixture = any("experts" in key for key in held)
    for number, layout in enumerate(layouts):
        layout = layout if mixture else (*layout[:2], 1)
        hf_to_megatron(tmp_path / "hf", tmp_path / str(number), tp=layout[0], pp=layout[1], ep=layout[2])
        found, right = written(tmp_path / str(number)), expected(held, config, layout)
        for key, value in right.items():
            assert torch.equal(found[key], value), (key, layout)
        assert all("norm" in key[0] for key in found.keys() - right.keys()), layout


def test_norms_are_whole_and_have_the_names_of_both_flavours(tmp_path: Path) -> None:
    """Before a router, and in latent attention, local modules and Transformer Engine's look for different names."""
    pre, fused = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
    cases = {
        "llama3": {"decoder.layers.0." + fused}, "qwen3_moe": {"decoder.layers.0." + fused, "decoder.layers.0." + pre},
        "qwen2_moe": {"decoder.layers.0." + fused, "decoder.layers.0." + pre},
        "deepseek_v3": {"decoder.layers.0." + fused, "decoder.layers.0." + pre},
    }  # fmt: skip
    for name, names in cases.items():
        model = make(name)
        model.save_pretrained(tmp_path / name)
        hf_to_megatron(tmp_path / name, tmp_path / f"{name}.m")
        found = written(tmp_path / f"{name}.m")
        right = tensors(tmp_path / name)["model.layers.0.post_attention_layernorm.weight"]
        assert {n for n, _ in found if n.startswith("decoder.layers.0.") and n.endswith((pre, fused))} == names
        for key in names:
            assert torch.equal(found[key, 0], right)
    latent = {n for n, _ in written(tmp_path / "deepseek_v3.m") if "decoder.layers.1.self_attention" in n and "norm" in n}
    head = "decoder.layers.1.self_attention."
    assert latent == {
        head + "q_layernorm.weight", head + "linear_q_up_proj.layer_norm_weight",
        head + "kv_layernorm.weight", head + "linear_kv_up_proj.layer_norm_weight",
    }  # fmt: skip
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" not in {n for n, _ in written(tmp_path / "deepseek_v3.m")}


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path / "hf")
    for layout, message in (({"tp": 3}, "does not divide by tp = 3"), ({"ep": 3}, "4 experts do not divide by ep = 3"),
                            ({"pp": 5}, "4 layers do not fill pp = 5")):  # fmt: skip
        with pytest.raises(LayoutError, match=message):
            hf_to_megatron(tmp_path / "hf", tmp_path / "m", **layout)
    assert not (tmp_path / "m").exists()
