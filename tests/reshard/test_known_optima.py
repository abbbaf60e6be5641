"""The known optima: Llama-2 in bf16, decimal GB per rank; gate and up are cut apart."""

import pytest

from rl3d.layout import GenLayout, Mesh, ShardLayout, TrainLayout, itemsize
from rl3d.models import Architecture, parameter_specs
from rl3d.models.shapes import find_model
from rl3d.reshard import build_plan, mesh_choices

MODELS = {"llama2-7b": 13.48, "llama2-70b": 137.95}


def specs_of(model):
    arch = Architecture.from_hf(find_model(model)[1])
    return parameter_specs(arch, arch.padded_vocab(8, 8), "bfloat16"), arch.num_layers


def best_plan(specs, layers, train, gen, gpus, per_node=None):
    train, gen = TrainLayout.parse(train).resolve(gpus), GenLayout.parse(gen)
    choice = min(mesh_choices(specs, train, gen, gpus, per_node))
    src = ShardLayout.training(Mesh.of(train, gpus, choice.order), layers, zero=train.zero)
    dst = ShardLayout.replicas(gen.tp, choice.gen_groups(gen.tp, gpus), layers)
    nodes = None if per_node is None else [rank // per_node for rank in range(gpus)]
    plan = build_plan(specs, src, dst, staging_bytes=48 << 20, nodes=nodes)
    assert plan.certificate.received == plan.certificate.bound and plan.certificate.staging_peak <= 48 << 20
    return plan.certificate


# (model, training, generation, GPUs, GPUs per node, received mean, received max, busiest sender)
KNOWN = [
    ("llama2-7b", "tp2.pp2.dp2", "tp4", 8, None, 1.685, 1.685, 1.685),
    ("llama2-7b", "dp8.zero3", "tp8", 8, None, 1.065, 1.155, 1.155),
    ("llama2-7b", "dp8.zero3", "tp4", 8, None, 2.407, 2.524, 2.524),
    ("llama2-7b", "tp4.pp2", "tp2", 8, None, 5.054, 5.054, 5.054),
    ("llama2-70b", "tp8.dp8", "tp4", 64, None, 17.244, 17.244, 17.244),
    ("llama2-70b", "tp8.dp8", "tp4", 64, 8, 17.244, 17.244, 17.244),
    ("llama2-70b", "tp4.pp4.dp4", "tp8", 64, None, 12.934, 12.967, 13.032),
    ("llama2-70b", "tp4.pp4.dp4", "tp8", 64, 8, 12.934, 12.967, None),
    ("llama2-70b", "dp64.zero3", "tp8", 64, None, 15.949, 15.978, 15.978),
    ("llama2-70b", "tp8.pp4.dp2", "tp4", 64, None, 30.178, 30.211, None),
]


@pytest.mark.parametrize("case", KNOWN, ids=lambda c: "-".join(str(x) for x in c[:5]))
def test_received_and_busiest_sender(case):
    model, train, gen, gpus, per_node, mean, most, sender = case
    specs, layers = specs_of(model)
    total = sum(s.numel // s.shape[0] * (s.valid_rows or s.shape[0]) * itemsize(s.dtype) for s in specs)
    assert total / 1e9 == pytest.approx(MODELS[model], abs=0.006)
    cert = best_plan(specs, layers, train, gen, gpus, per_node)
    assert sum(cert.received) / gpus / 1e9 == pytest.approx(mean, abs=2e-3)
    assert max(cert.received) / 1e9 == pytest.approx(most, abs=2e-3)
    if sender is not None:
        assert max(cert.sent) / 1e9 == pytest.approx(sender, abs=2e-3)
    ratios = cert.ratios
    assert max(ratios["ingress"], ratios["between"], ratios["inside"]) < 1.001, ratios
    if per_node is None:
        assert ratios["sent"] < 1.0005
    # Few buckets beyond what the busiest rank alone would need
    assert cert.buckets <= 1.12 * max(*cert.sent, *cert.received) / (48 << 20) + 2
