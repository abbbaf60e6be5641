"""Bytes and seconds of some plans, as the table in docs/numbers.md: python docs/plans.py (no torch, no GPU)."""

import time

from rl3d.layout import GenLayout, Mesh, TrainLayout
from rl3d.layout.sharding import ShardLayout
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard import build_plan, mesh_choices

COMMON = dict(model_type="llama", num_attention_heads=64, vocab_size=32000, rope_theta=10000.0)
MODELS = {
    "Llama-2-7B": COMMON | dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008),
    "Llama-2-70B": COMMON | dict(num_hidden_layers=80, hidden_size=8192, num_key_value_heads=8, intermediate_size=28672),
}
CASES = (
    ("Llama-2-7B", "tp2.pp2.dp2", "tp4", 8),
    ("Llama-2-7B", "tp4.pp2.dp1", "tp2", 8),
    ("Llama-2-70B", "tp8.pp2.dp2", "tp8", 32),
    ("Llama-2-70B", "tp4.pp4.dp4", "tp8", 64),
    ("Llama-2-70B", "tp8.pp1.dp8", "tp4", 64),
)
PER_NODE = 8


def row(model: str, train_text: str, gen_text: str, ranks: int) -> str:
    """One line of the table: bf16, eight ranks in a node, staging 48 MiB a direction."""
    arch, train, gen = Architecture.from_hf(MODELS[model]), TrainLayout.parse(train_text), GenLayout.parse(gen_text)
    specs = parameter_specs(arch, arch.padded_vocab(train.tp, gen.tp), "bfloat16")
    start = time.perf_counter()
    best = min(mesh_choices(specs, train, gen, ranks, PER_NODE))
    source = ShardLayout.training(Mesh.of(train, ranks, best.order), arch.num_layers)
    target = ShardLayout.replicas(gen.tp, best.gen_groups(gen.tp, ranks), arch.num_layers)
    nodes = [rank // PER_NODE for rank in range(ranks)]
    facts = build_plan(specs, source, target, staging_bytes=48 << 20, nodes=nodes).certificate.to_json()
    seconds = time.perf_counter() - start
    gigabytes = [facts[key] / 1e9 for key in ("received_mean", "received_max", "bound_mean", "sent_max", "between_nodes")]
    cells = [model, train_text, gen_text, str(ranks), *(f"{value:.2f}" for value in gigabytes), f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    heads = "model, train, generate, ranks, received mean, max, bound mean, sent max, between nodes (all), seconds to plan"
    print("| " + heads.replace(", ", " | ") + " |\n" + "|---" * 3 + "|--:" * 7 + "|")
    for case in CASES:
        print(row(*case), flush=True)
