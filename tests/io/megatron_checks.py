"""megatron-core's own modules and its own dist_checkpointing, reading what the converter wrote, at several layouts."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from tests.models.zoo import EVERY


def main(runtime: Any, directory: str, names: list[str], layouts: list[tuple[int, int]], padded: int, tokens: list[int],
         ) -> dict[str, Any]:  # fmt: skip
    """Writes logits of ``tokens`` as ``NAME-tpT-ppP.pt``; and each model as megatron-core saves it at tp 2, pp 1."""
    root = Path(directory)
    EVERY.setdefault("mistral-tied", (EVERY["mistral"][0], {**EVERY["mistral"][1], "tie_word_embeddings": True}))
    for tp, pp in layouts:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp)
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.get_cuda_rng_tracker().add("model-parallel-rng", 1)  # its attention forks it, dropout or not
        for name in names:
            model = _model(name, tp, pp, padded)
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
            wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
            loaded = dist_checkpointing.load(wanted, str(root / f"{name}.megatron"))
            missing, extra = model.load_state_dict(loaded, strict=False)
            assert not extra and not [k for k in missing if "_extra_state" not in k], (missing, extra)
            logits = _logits(model, torch.tensor([tokens]), pp)
            if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
                torch.save(logits[0, :, : EVERY[name][1]["vocab_size"]], root / f"{name}-tp{tp}-pp{pp}.pt")
            if (tp, pp) == (2, 1):
                out = root / f"{name}.saved"
                out.mkdir(exist_ok=True)
                dist.barrier()
                dist_checkpointing.save(model.sharded_state_dict(), str(out))
    dist.barrier()
    return {}


def _model(name: str, tp: int, pp: int, padded: int) -> Any:
    sizes = EVERY[name][1]
    config = TransformerConfig(
        num_layers=sizes["num_hidden_layers"], hidden_size=sizes["hidden_size"], ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"], num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"], normalization="RMSNorm", layernorm_epsilon=sizes["rms_norm_eps"],
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, qk_layernorm=name.startswith("qwen3"),
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, persist_layer_norm=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, attention_softmax_in_fp32=True,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=name.startswith("qwen3"))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config, layer, vocab_size=padded, max_sequence_length=256, pre_process=stage == 0, post_process=stage == pp - 1,
        share_embeddings_and_output_weights=bool(sizes.get("tie_word_embeddings")), position_embedding_type="rope",
        rotary_base=2e4,
    ).eval()  # fmt: skip


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor, pp: int) -> torch.Tensor | None:
    """[1, T, padded vocabulary] on the last stage."""
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    rank = dist.get_rank()
    if pp > 1 and not model.pre_process:
        hidden = torch.empty(length, 1, model.config.hidden_size)
        dist.recv(hidden, rank - dist.get_world_size() // pp)
        model.set_input_tensor(hidden)
    out = model(tokens, positions, mask)
    if not model.post_process:
        dist.send(out.contiguous(), rank + dist.get_world_size() // pp)
        return None
    parts = [torch.empty_like(out) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, out.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)
