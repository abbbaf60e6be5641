"""Checks of the actor on four ranks; facts go back to test_actor.py, which asserts on them."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl3d import Actor, PPOConfig
from rl3d.engine.hybrid import ModeError
from rl3d.engine.policy import TrainSample
from rl3d.engine.rollout import train_samples
from rl3d.io import import_hf
from rl3d.models import Architecture, parameter_specs
from rl3d.reshard.fingerprint import compare, fingerprint_tensor
from rl3d.utils import enable_switch_profiling, save_switch_trace, switch_report
from tests.engine import carry_checks
from tests.reference import pair_tokenizer, sequences

NEW_TOKENS = 10
SHARDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp2.pp1.zero2", {"sequence_parallel": True, "recompute": "full", "offload": "optimizer", "transport": "peer"}),
    ("tp2.pp1.zero3", {"sequence_parallel": True, "recompute": "selective", "transport": "auto"}),
    ("tp1.pp1.zero3", {"offload": "params", "transport": "auto", "reference_residency": "host"}),
)


def prompts() -> torch.Tensor:
    """Six ragged prompts, left-padded with 0, the same everywhere."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.zeros(6, 12, dtype=torch.int64)
    for row, length in zip(rows, (3, 9, 5, 12, 7, 1), strict=True):
        row[12 - length :] = torch.randint(3, 253, (length,), generator=generator)
    return rows


def main(runtime: Any, directory: str, train: str = "tp2.pp2.zero1", gens: tuple[str, ...] = ("tp1", "tp2", "tp4")) -> dict:
    root = Path(directory)
    facts: dict[str, Any] = {"generations": []}
    for tied in (False, True):
        for gen in gens:
            facts["generations"].append(_generation(root, tied, train, gen))
    facts["life"] = [_life(root, tied, train, gens[-1], copy) for tied, copy in ((True, "keep"), (False, "drop"))]
    # gradients sharded, weights sharded: what the training engine holds is flat parts at stage 3
    for layout, memory in SHARDED:
        facts["generations"].append(_generation(root, True, layout, "tp4", **memory))
        facts["life"].append(_life(root, False, layout, "tp4", "keep", **memory))
    facts["resumed"] = [
        _resume(root / "tied", layout, offload)
        for layout, offload in (("tp2.pp1.zero2", "optimizer"), ("tp2.pp1.zero3", "none"), ("tp1.pp1.zero3", "params"))
    ]
    facts["carried"] = carry_checks.main(root)
    facts["file"] = _same_as_file(root / "tied", train)
    # two valid samples for four data-parallel ranks: some have nothing to learn from, and none may hang
    facts["few"] = [
        _one_update(root / "tied", layout, 16, "token-mean", count=2, dtype=dtype)
        for layout, dtype in (("tp1.pp1.zero1", "float32"), ("tp1.pp1.zero2", "float32"), ("tp1.pp1.zero3", "float32"),
                              ("tp1.pp1.zero1", "bfloat16"))
    ]  # fmt: skip
    return facts


def _one_update(directory: Path, train: str, micro_batch_tokens: int, mode: str, count: int = 8,
                dtype: str = "float32") -> dict[str, Any]:  # fmt: skip
    """Loss and gradient norm of the same eight samples, one of them invalid, at a learning rate of 0."""
    config = PPOConfig(batch_size=8, kl_coef=0.0, entropy_coef=0.01, micro_batch_tokens=micro_batch_tokens,
                       loss_aggregation=mode, max_grad_norm=0.5)  # fmt: skip
    actor = Actor(directory, train=train, algorithm=config, dtype=dtype)
    samples = [
        TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), (-1.0) ** i * (i + 1), valid=i != 3)
        for i, s in enumerate(sequences(0)[:count])
    ]
    metrics = actor.learn(samples, [range(count)], 0.7, lambda: 0.0)
    return {"train": train, "tokens": micro_batch_tokens, "mode": mode, **metrics}


def _generation(root: Path, tied: bool, train: str, gen: str, **memory: Any) -> dict[str, Any]:
    """Greedy and sampled responses in one generation layout, with the training engine's log-probabilities."""
    tokenizer = pair_tokenizer()
    actor = Actor(root / ("tied" if tied else "untied"), tokenizer, train=train, gen=gen, seed=11, **memory)
    ids = prompts()
    actor.switch_to_generation()
    greedy = actor.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=[])
    stop = [tokenizer.decode(greedy[0, 15:17])[1:3], "no such text"]  # the end of one token and the start of the next
    stopped = actor.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=[], stop=stop)
    actor.switch_to_training()
    sampled = actor.rollout(ids, max_new_tokens=NEW_TOKENS, temperature=0.8, stop_token_ids=[])
    # zero learning rate: what the training engine thinks of the same tokens, and nothing else
    metrics = actor.learn(
        train_samples(actor._remembered[-1].prompts, [r.tolist() for r in sampled.sequences[:, 12:]],
                      torch.arange(6.0), sampled.logprobs, actor.algorithm.norm_adv_by_std),
        [range(6)], 0.8, lambda: 0.0,
    )  # fmt: skip
    return {
        "tied": tied, "gen": gen, "greedy": greedy.tolist(), "stop": stop, "stopped": stopped.tolist(),
        "sampled": sampled.sequences.tolist(),
        "logprobs": sampled.logprobs.tolist(), "against_training": metrics["training/rollout_logprobs_diff_max"],
        "log_ratio": metrics["actor/log_ratio_max_first"], "order": list(actor.parts.mesh_order),
    }  # fmt: skip


def _life(root: Path, tied: bool, train: str, gen: str, copy: str, **memory: Any) -> dict[str, Any]:
    """Round trips, an update, a switch on rank 0 alone, an export, and calls in the wrong mode."""
    config = PPOConfig(batch_size=8, mini_batch_size=4, lr=1e-3, kl_coef=0.1)
    actor = Actor(root / ("tied" if tied else "untied"), train=train, gen=gen, training_copy=copy,
                  algorithm=config, reference=True, **memory)  # fmt: skip
    before = actor.hybrid.training_fingerprints()
    enable_switch_profiling()
    trips, transports = [], set()
    for _ in range(3):
        transports.add(actor.switch_to_generation().transport)
        trips += compare(before, actor.hybrid.generation_fingerprints())
        actor.switch_to_generation()
        actor.switch_to_training()
        trips += compare(before, actor.hybrid.training_fingerprints())
    profile = switch_report()
    trace = json.loads(save_switch_trace(root / "trace" / f"{copy}-{train}-{{rank}}.json").read_text())
    out = actor.rollout(prompts(), max_new_tokens=NEW_TOKENS)
    errors = {"foreign": _error(lambda: actor.update(out.sequences + 1, torch.arange(6.0), out.logprobs))}
    errors["generate"] = _error(lambda: actor.generate(prompts()))
    metrics = actor.update(out.sequences, torch.arange(6.0), out.logprobs)
    actor.switch_to_generation()
    errors["update"] = _error(lambda: actor.update(out.sequences, torch.arange(6.0), out.logprobs))
    moved = compare(actor.hybrid.generation_fingerprints(), before)
    generation = actor.hybrid.generation_fingerprints()
    if actor.runtime.rank == 0:
        actor.switch_to_training()
    dist.barrier()
    learned = compare(generation, actor.hybrid.training_fingerprints())
    name = f"export-{copy}-{train}"
    actor.save_hf(root / name)
    actor.save_megatron(root / f"megatron-{name}")
    after = actor.rollout(prompts(), max_new_tokens=NEW_TOKENS, stop_token_ids=[])
    return {
        "copy": copy, "trips": trips, "profile": profile, "trace": trace, "changed": len(moved), "parameters": len(before),
        "learned": learned, "transport": sorted(transports),
        "mode": actor.hybrid.mode, "errors": errors, "metrics": metrics, "export": name,
        "sequences": after.sequences.tolist(), "logprobs": after.logprobs.tolist(),
    }  # fmt: skip


def _resume(directory: Path, train: str, offload: str) -> list[str]:
    """Two updates, against one update, a state taken there, and the second in a new actor that loads it."""
    config = PPOConfig(batch_size=8, kl_coef=0.0, lr=1e-3)
    samples = [TrainSample(s.tokens[: s.prompt].tolist(), s.tokens[s.prompt :].tolist(), (-1.0) ** i)
               for i, s in enumerate(sequences(0))]  # fmt: skip

    def learn(actor: Actor) -> None:
        actor.learn(samples, [range(8)], 1.0, lambda: 1e-3)

    through, resumed = (Actor(directory, train=train, gen="tp2", algorithm=config, offload=offload) for _ in range(2))
    learn(through)
    state = through.parts.train.zero.state_dict()
    learn(through)
    resumed.parts.train.zero.load_state_dict(state)
    learn(resumed)
    return compare(through.hybrid.training_fingerprints(), resumed.hybrid.training_fingerprints())


def _error(call: Any) -> str:
    try:
        call()
    except (ModeError, ValueError) as error:
        return str(error)
    return "no error"


def _same_as_file(directory: Path, train: str) -> list[str]:
    """Fingerprints of the sharded model against those of the checkpoint's own tensors."""
    actor = Actor(directory, train=train, gen="tp2")
    arch = Architecture.from_hf(directory)
    specs = parameter_specs(arch, actor.parts.padded_vocab)
    whole = {s.name: torch.empty(s.shape) for s in specs}
    import_hf(directory, arch, actor.parts.padded_vocab, whole, 1, 0)
    expected = {s.name: fingerprint_tensor(whole[s.name], s.valid_rows) for s in specs}
    return compare(expected, actor.hybrid.training_fingerprints())
