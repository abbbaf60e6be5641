"""Which tensor-parallel sizes cut a decoder: arithmetic on its sizes."""


def cut_problem(tp: int, heads: int, kv_heads: int, ffn: int) -> str | None:
    """Why ``tp`` cannot cut a model of these sizes, or ``None`` when it can.

    megatron-core cuts the fused QKV by raw rows, so a ``tp`` above the number of KV heads is possible where it is a
    multiple of it.
    """
    if heads % tp:
        return f"{heads} query heads do not divide by tp={tp}"
    if kv_heads % tp and tp % kv_heads:
        return f"tp={tp} neither divides the {kv_heads} key/value heads nor is a multiple of them"
    if ffn % tp:
        return f"the feed-forward size {ffn} does not divide by tp={tp}"
    return None


def tp_sizes(heads: int, kv_heads: int, ffn: int) -> tuple[int, ...]:
    """All tensor-parallel sizes that cut the model, rising."""
    return tuple(tp for tp in range(1, heads + 1) if cut_problem(tp, heads, kv_heads, ffn) is None)
