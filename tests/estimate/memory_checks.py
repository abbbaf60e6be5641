"""What autograd saves and what DeepSpeed allocates, on two ranks, beside what the plan says."""

import gc
import itertools
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rl3d.distributed import bootstrap
from rl3d.distributed.groups import GroupRegistry, ModelGroups, training_groups
from rl3d.engine.microbatch import MicroBatch
from rl3d.engine.training import TrainingEngine
from rl3d.engine.zero import AdamSettings
from rl3d.estimate.activations import token_bytes
from rl3d.estimate.memory import predict
from rl3d.estimate.rollout import cache_bytes, generation_weights, working_bytes
from rl3d.estimate.settings import MemorySettings
from rl3d.generation.attention import CachedSelfAttention
from rl3d.generation.engine import Request, SamplingParams
from rl3d.generation.megatron import MegatronGenerator
from rl3d.layout import GenLayout, Mesh, TrainLayout
from rl3d.models import Architecture
from rl3d.models.build import build_model
from tests.estimate.meter import Meter, SavedBytes

SHAPE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 1021, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {**SHAPE, "hidden_size": 96, "intermediate_size": 512, "num_key_value_heads": 8, "head_dim": 12}
FAMILIES = {
    "llama": SHAPE,
    "wide": WIDE,
    "qwen2": {**SHAPE, "model_type": "qwen2", "num_key_value_heads": 1},
    "qwen3": {**SHAPE, "model_type": "qwen3"},
    "olmo2": {**SHAPE, "model_type": "olmo2"},
}
TOKENS = 128


def main(runtime: Any) -> dict[str, Any]:
    bootstrap.init_deepspeed()
    gc.freeze()  # what is imported by now need not be looked at in every collection
    registry = GroupRegistry(60)
    groups = {tp: training_groups(Mesh(tp, 1, runtime.world_size // tp), registry) for tp in (1, 2)}
    return {
        "saved": saved(groups), "peaks": peaks(groups), "generation": [generation(groups[tp]) for tp in (1, 2)],
        "refused": refused(runtime),
    }  # fmt: skip


def refused(runtime: Any) -> list[str]:
    """What each rank says to a run that its device cannot hold."""
    from rl3d.config import ConfigError, RunConfig, resolve
    from rl3d.trainer.memory import check_memory

    small = RunConfig(
        model={"random": {"config": SHAPE}}, data={"train": "tiny:copy"}, reward={"function": "rl3d.rewards.tiny:score"},
        layout={"ranks": runtime.world_size, "device": "cpu", "memory_limit_gb": 0.001},
    )  # fmt: skip
    try:
        check_memory(resolve(small, world_size=runtime.world_size, gpus=0), runtime)
        said = ""
    except ConfigError as error:
        said = str(error)
    every: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(every, said, group=runtime.cpu_group)
    return every


def generation(groups: ModelGroups) -> dict[str, Any]:
    """Weights, cache and working memory of a generator."""
    prompt, new, count = 96, 8, 12
    arch, model = _model(SHAPE, groups, torch.bfloat16, mode="generate", self_attention=CachedSelfAttention)
    generator = MegatronGenerator(
        model, groups.tp, arch.vocab_size, max_sequences=count, max_sequence_length=prompt + new, device="cpu",
        dtype=torch.bfloat16, max_prefill_tokens=480, cache_strategy="full",
    )  # fmt: skip
    generator.weights_version = 0
    meter = Meter(model.parameters())
    found = {"weights": meter.now, "cache": generator.allocate_cache()}
    meter.add(generator.cache.keys)
    meter.add(generator.cache.values)
    before = meter.now
    with meter:
        generator.generate([
            Request([3 + i] * prompt, SamplingParams(new, 1.0, 1.0, 0, (), seed=0), (0, i, 0)) for i in range(count)
        ])  # fmt: skip
    found["working"] = meter.peak - before
    settings = MemorySettings(dtype="bfloat16", device="cpu", max_sequence_length=prompt + new, max_sequences=count,
                              max_prefill_tokens=480)  # fmt: skip
    gen, padded, own = GenLayout(groups.tp_size), arch.padded_vocab(2), replace(settings, alias=False)
    expected = {
        "weights": generation_weights(arch, padded, TrainLayout(), gen, own), "cache": cache_bytes(arch, gen, settings),
        "working": working_bytes(arch, padded, gen, settings),
    }  # fmt: skip
    return {"name": str(gen), "found": found, "expected": expected}


def row(tokens: int = TOKENS) -> MicroBatch:
    """One row of two sequences, all but the first four tokens of each predicted."""
    half = tokens // 2
    ids = torch.randint(0, 1000, (tokens,))
    select = torch.cat([torch.arange(3, half - 1), torch.arange(half + 3, tokens - 1)])
    positions = torch.cat([torch.arange(half), torch.arange(half)])
    return MicroBatch(ids, positions, (half, half), select, ids[select + 1], {})


def _model(config: dict[str, Any] | Architecture, groups: ModelGroups, dtype: torch.dtype,
           **options: Any) -> tuple[Architecture, Any]:  # fmt: skip
    arch = config if isinstance(config, Architecture) else Architecture.from_hf(config)
    model = build_model(arch, groups, padded_vocab=arch.padded_vocab(2), dtype=dtype, device=torch.device("cpu"), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return arch, model


def _saved_bytes(config: dict[str, Any], layers: int, groups: ModelGroups, dtype: torch.dtype, **options: Any) -> int:
    _, model = _model({**config, "num_hidden_layers": layers}, groups, dtype, **options)
    batch = row()
    hooks = SavedBytes(model.parameters())
    with hooks:
        out = model(batch.tokens_T[None], batch.positions_T[None], None, packed_seq_params=batch.boundaries(),
                    output_processor=lambda *, hidden_states, **_: hidden_states)  # fmt: skip
    size = hooks.bytes
    out.sum().backward()  # collectives in step on all ranks
    return size


def saved(groups: dict[int, ModelGroups]) -> list[dict[str, Any]]:
    """Per-token bytes of a layer and of the ends, measured and predicted, for every family, tp, dtype and mode."""
    cases = [(family, tp, "bfloat16", {}) for family, tp in itertools.product(FAMILIES, (1, 2))]
    cases += [(family, tp, "float32", {}) for family, tp in itertools.product(("llama", "olmo2"), (1, 2))]
    cases += [("llama", 2, dtype, {"sequence_parallel": True}) for dtype in ("float32", "bfloat16")]
    cases += [
        ("llama", tp, "bfloat16", {"recompute": mode}) for tp, mode in itertools.product((1, 2), ("selective", "full"))
    ]
    cases += [("llama", 2, "bfloat16", {"recompute": "full", "sequence_parallel": True})]
    rows = []
    for family, tp, dtype, options in cases:
        config = FAMILIES[family]
        sizes = [_saved_bytes(config, n, groups[tp], getattr(torch, dtype), **options) / TOKENS for n in (2, 4)]
        settings = MemorySettings(dtype=dtype, device="cpu", **options)
        expected = token_bytes(Architecture.from_hf(config), tp, settings)
        rows.append({
            "name": f"{family} tp{tp} {dtype} {options}",
            "layer": (sizes[1] - sizes[0]) / 2, "layer_expected": expected.kept,
            "ends": 2 * sizes[0] - sizes[1], "ends_expected": expected.ends,
        })  # fmt: skip
    return rows


def peaks(groups: dict[int, ModelGroups]) -> list[dict[str, Any]]:
    """Bytes held between steps, and the most during log-probabilities, update and optimiser step."""
    cases: list[tuple[int, int, str, dict[str, Any]]] = [
        (1, stage, dtype, {}) for stage, dtype in itertools.product((0, 1, 2, 3), ("float32", "bfloat16"))
    ]
    cases += [(2, 1, "bfloat16", {}), (2, 1, "bfloat16", {"recompute": "full"}), (2, 1, "float32", {})]
    found = [_peak(groups[tp], stage, dtype, options) for tp, stage, dtype, options in cases]
    return found + [_peak(groups[1], stage, "bfloat16", {}, critic=True) for stage in (1, 2)]


def _peak(groups: ModelGroups, stage: int, dtype: str, options: dict[str, Any], critic: bool = False) -> dict[str, Any]:
    tokens, chunk, rows = 256, 64, 3
    arch = Architecture.from_hf(SHAPE)
    arch, model = _model(arch.as_value_model() if critic else arch, groups, getattr(torch, dtype), **options)
    meter = Meter()
    with meter:
        engine = TrainingEngine(model, arch, groups, stage=stage, settings=AdamSettings(lr=1e-4), logprob_chunk=chunk)
    for parameter in model.parameters():
        meter.add(parameter)
    batches = [row(tokens) for _ in range(rows)]

    def loss(first: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -first.sum(), {}  # log-probabilities, or values

    def settle() -> None:
        """A bucket that hangs in a reference cycle, or in gloo's thread that has just reduced it, would count or not, as it
        happens."""
        dist.barrier()
        time.sleep(0.02)
        gc.collect()

    found: dict[str, int] = {}
    step = engine.zero.step

    def timed(*args: Any) -> Any:
        found["update"] = meter.peak
        settle()
        meter.reset()
        return step(*args)

    engine.zero.step = timed  # type: ignore[method-assign]
    with meter:
        engine.train_step(batches, loss, 1.0)  # moments appear
        engine.train_step(batches, loss, 1.0)
        settle()
        found["held"] = meter.now
        meter.reset()
        engine.train_step(batches, loss, 1.0)
        found["optimiser step"] = meter.peak
        meter.reset()
        if critic:
            engine.values(batches)
        else:
            engine.logprobs(batches, 1.0)
        found["old log-probabilities"] = meter.peak
    train = TrainLayout(groups.tp_size, 1, groups.dp_size, stage)
    settings = MemorySettings(
        dtype=dtype, device="cpu", max_sequence_length=tokens // 2, responses=2 * rows * groups.dp_size,
        micro_batch_tokens=tokens, logprob_chunk_tokens=chunk, reference="none",
        critic="device" if critic else "none", **options,
    )  # fmt: skip
    plan = predict(Architecture.from_hf(SHAPE), train, GenLayout(2), settings)
    resident = plan.phase("switch").items
    names = {name: name for name in ("update", "optimiser step", "old log-probabilities")}
    if critic:
        names = {"update": "critic update", "optimiser step": "critic step", "old log-probabilities": "values"}
    mine = {"critic"} if critic else resident.keys() - {"generation weights", "staging"}
    other = sum(size for item, size in resident.items() if item not in mine and item != "staging")
    expected = {name: plan.phase(phase).bytes - other for name, phase in names.items()}
    expected["held"] = sum(resident[item] for item in mine)
    dist.barrier()
    return {"name": f"{train} {dtype} {options}{' critic' * critic}", "found": found, "expected": expected}
