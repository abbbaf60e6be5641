"""The plan of a switch, without a GPU and without torch: Llama-2-7B, TP2·PP2·DP2 -> TP4 on eight ranks.

python docs/plan_7b.py
"""

from rich.console import Console

from rl3d.layout import GenLayout, GenMesh, Mesh, TrainLayout
from rl3d.layout.sharding import ShardLayout
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard import build_plan, choose_mesh_order

ranks, train, gen = 8, TrainLayout.parse("tp2.pp2.zero1"), GenLayout.parse("tp4")
llama_2_7b = Architecture.from_hf(
    dict(model_type="llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=32,
         intermediate_size=11008, vocab_size=32000, rope_theta=10000.0)
)  # fmt: skip
specs = parameter_specs(llama_2_7b, llama_2_7b.padded_vocab(train.tp, gen.tp), "bfloat16")

order = choose_mesh_order(specs, train, gen, ranks)  # of six, the one that moves the least
source = ShardLayout.training(Mesh.of(train, ranks, order), llama_2_7b.num_layers)
target = ShardLayout.generation(GenMesh(gen.tp, tuple(range(ranks))), llama_2_7b.num_layers)
plan = build_plan(specs, source, target, staging_bytes=48 << 20)
Console(width=80).print(plan.summary_table())
