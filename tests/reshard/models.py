"""Specifications of llama-shaped models for tests, small or real."""

from rl3d.layout import ParamSpec


def llama(
    layers: int,
    hidden: int,
    ffn: int,
    vocab: int,
    qkv_rows: int,
    *,
    padded_vocab: int | None = None,
    tied: bool = False,
    dtype: str = "bfloat16",
    norm_dtype: str | None = None,
    experts: int = 0,
) -> list[ParamSpec]:
    """All parameters in the order of the forward pass."""
    norm_dtype, padded = norm_dtype or dtype, padded_vocab or vocab
    valid = vocab if padded != vocab else None
    out = [
        ParamSpec(
            "embedding.word_embeddings.weight", (padded, hidden), 0, place="pre+post" if tied else "pre",
            dtype=dtype, valid_rows=valid,
        )
    ]  # fmt: skip
    for i in range(layers):
        at = f"decoder.layers.{i}"
        out += [
            ParamSpec(f"{at}.input_layernorm.weight", (hidden,), None, layer=i, dtype=norm_dtype),
            ParamSpec(f"{at}.self_attention.linear_qkv.weight", (qkv_rows, hidden), 0, layer=i, dtype=dtype),
            ParamSpec(f"{at}.self_attention.linear_qkv.bias", (qkv_rows,), 0, layer=i, dtype=dtype),
            ParamSpec(f"{at}.self_attention.linear_proj.weight", (hidden, hidden), 1, layer=i, dtype=dtype),
            ParamSpec(f"{at}.mlp.linear_fc1.weight", (2 * ffn, hidden), 0, (ffn, ffn), layer=i, dtype=dtype),
            ParamSpec(f"{at}.mlp.linear_fc2.weight", (hidden, ffn), 1, layer=i, dtype=dtype),
        ]
        for e in range(experts):
            name = f"{at}.mlp.experts.local_experts.{e}" if i % 2 else f"{at}.mlp.experts"
            end = "" if i % 2 else str(e)
            out += [
                ParamSpec(f"{name}.linear_fc1.weight{end}", (2 * ffn, hidden), 0, (ffn, ffn), i, dtype=dtype, expert=e),
                ParamSpec(f"{name}.linear_fc2.weight{end}", (hidden, ffn), 1, layer=i, dtype=dtype, expert=e),
            ]
    out.append(ParamSpec("decoder.final_layernorm.weight", (hidden,), None, place="post", dtype=norm_dtype))
    if not tied:
        out.append(ParamSpec("output_layer.weight", (padded, hidden), 0, place="post", dtype=dtype, valid_rows=valid))
    return out


def llama_7b() -> list[ParamSpec]:
    """Llama-2 7B in bf16: no biases, two norms a layer."""
    specs = [s for s in llama(32, 4096, 11008, 32000, 3 * 4096) if not s.name.endswith("bias")]
    extra = [
        ParamSpec(f"decoder.layers.{i}.pre_mlp_layernorm.weight", (4096,), None, layer=i, dtype="bfloat16")
        for i in range(32)
    ]
    return specs + extra


def llama_70b() -> list[ParamSpec]:
    """Llama-2 70B in bf16 (norm before the MLP left out: 1.3 MB)."""
    return [s for s in llama(80, 8192, 28672, 32000, 10240) if not s.name.endswith("bias")]
