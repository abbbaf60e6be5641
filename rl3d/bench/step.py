"""Whole steps of reinforcement learning with random weights of a given shape: seconds by phase, MFU, memory."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl3d.bench import BenchError

HELP = "RL steps with random weights of a shape: seconds by phase, MFU of the update, memory."
PHASES = (
    ("sample", "timing_s/gen"), ("switch", "timing_s/update_weights"), ("old log-probabilities", "timing_s/old_log_prob"),
    ("reference", "timing_s/ref"), ("values", "timing_s/values"), ("update critic", "timing_s/update_critic"),
    ("update actor", "timing_s/update_actor"), ("samples to all ranks", "timing_s/exchange"), ("rows", "timing_s/rows"),
    ("step", "timing_s/step"),
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="shipped shape (qwen2.5-1.5b), config.json or directory")
    parser.add_argument("--config", metavar="FILE", help="take layouts, rollout and algorithm from a run's configuration, "
                        "prompts and responses as long as it allows; the options below are then ignored")  # fmt: skip
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="ppo trains a critic too; grpo")
    parser.add_argument("--train", default="tp1.pp1.zero1", metavar="LAYOUT", help="tp1.pp1.zero1")
    parser.add_argument("--gen", default="tp1", metavar="LAYOUT", help="tp1")
    parser.add_argument("--ranks", type=int, default=1, help="ranks started on this machine; 1")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a step; 16")
    parser.add_argument("--samples", type=int, default=4, help="responses to each; 4")
    parser.add_argument("--prompt-len", type=int, default=256, metavar="N", help="tokens; 256")
    parser.add_argument("--response-len", type=int, default=128, metavar="N", help="tokens; 128")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, metavar="N", help="16384")
    parser.add_argument("--steps", type=int, default=3, help="the first warms up and is left out; 3")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="any key of the configuration, as in layout.recompute=full")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Start the ranks where they are not started yet; rank 0 prints the table."""
    if args.steps < 2:
        raise BenchError(f"bench step: --steps {args.steps}; the first step warms up, so give 2 or more")
    if args.ranks > 1 and "RANK" not in os.environ:
        from rl3d.distributed.launcher import launch_local

        return launch_local(["-m", "rl3d", *sys.argv[1:]], args.ranks)
    from rl3d.models.shapes import find_model

    name, config = find_model(args.model)
    with tempfile.TemporaryDirectory(prefix="rl3d-bench-") as scratch:
        rows, facts = _steps(args, config, Path(scratch))
    if rows is not None:
        _print(args, name, rows, facts)
    return 0


def _steps(args: argparse.Namespace, hf_config: dict[str, Any], scratch: Path) -> tuple[list[dict] | None, dict[str, Any]]:
    """Metrics of the measured steps (on rank 0, elsewhere ``None``), and what is worth saying about the run."""
    import torch

    from rl3d.bench.synthetic import RandomPrompts, coin
    from rl3d.config import load_config, resolve
    from rl3d.distributed import bootstrap, failures
    from rl3d.distributed.environment import detect
    from rl3d.io import write_random_model
    from rl3d.trainer.memory import check_memory
    from rl3d.trainer.run import build_actor
    from rl3d.trainer.trainer import RLTrainer

    file = scratch / "step.yaml"
    model = write_random_model(scratch / "model", hf_config)
    settings = _from_config(args.config) if args.config else _from_options(args)
    settings["model"] = {**settings.get("model", {}), "path": str(model), "tokenizer": None, "random": None}
    settings["data"]["train"] = "tiny:echo"  # never read
    settings["reward"] = {"function": "rl3d.bench.synthetic:coin"}
    settings["trainer"] = {
        **settings.get("trainer", {}), "name": "bench", "output_dir": str(scratch), "steps": args.steps, "resume": "never",
        "loggers": [], "save_every": 0, "export_hf": False, "samples_per_step": 0,
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    config = resolve(load_config(file, args.overrides), world_size=detect().world_size)
    runtime = bootstrap.init(timeout_s=config.trainer.timeout_s, device=config.layout.device)
    with failures.guard(runtime):
        plan = check_memory(config, runtime)
        actor = build_actor(config, model, None)
        stream = RandomPrompts(config.algorithm.batch_size, config.data.max_prompt_tokens, actor.parts.arch.vocab_size)
        trainer = RLTrainer(actor, None, stream, config.algorithm, coin, rollout=config.rollout, trainer=config.trainer,
                            memory_plan=plan)  # fmt: skip
        trainer.stop_token_ids = ()  # every response has its full length
        rows = [trainer.step() for _ in range(args.steps)][1:]
        args.algorithm, args.train, args.gen = config.algorithm.name, config.layout.train, config.layout.gen
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU"
        return rows if runtime.rank == 0 else None, {"device": device, "ranks": runtime.world_size}


def _from_config(path: str) -> dict[str, Any]:
    """The sections of a configuration file that say how a step is made."""
    from rl3d.config import load_config

    whole = load_config(path).model_dump(mode="json")
    return {
        name: whole[name] for name in ("model", "layout", "data", "rollout", "algorithm", "trainer", "deepspeed", "megatron")
    }


def _from_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {"max_sequence_length": args.prompt_len + args.response_len},
        "layout": {"train": args.train, "gen": args.gen, "device": args.device},
        "data": {"max_prompt_tokens": args.prompt_len},
        "rollout": {"n": args.samples, "max_new_tokens": args.response_len, "max_sequences": args.prompts * args.samples},
        "algorithm": {"name": args.algorithm, "batch_size": args.prompts, "use_critic": args.algorithm == "ppo",
                      "micro_batch_tokens": args.micro_batch_tokens},
    }  # fmt: skip


def _print(args: argparse.Namespace, name: str, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if isinstance(rows[0][key], int | float)}
    found = {
        **facts, "model": name, "algorithm": args.algorithm, "train": args.train, "gen": args.gen,
        "seconds": {label: mean[key] for label, key in PHASES if key in mean},
        "tokens": mean["perf/total_num_tokens"], "tokens_per_second_and_rank": mean["perf/throughput"],
        "mfu_update_actor": mean.get("perf/mfu/actor"), "peak_gb": max(r["perf/max_memory_allocated_gb"] for r in rows),
        "predicted_peak_gb": mean.get("memory/predicted_gb"),
        "memory_gb": {key.removeprefix("memory/"): size for key, size in mean.items() if key.startswith("memory/")},
    }  # fmt: skip
    if args.json:
        print(json.dumps(found))
        return
    print(f"{name}, {args.algorithm}, {args.train} -> {args.gen}, {facts['ranks']} x {facts['device']}, "
          f"{found['tokens']:.0f} tokens a step\n\n| phase | seconds |\n|---|--:|")  # fmt: skip
    for label, seconds in found["seconds"].items():
        print(f"| {label} | {seconds:.3f} |")
    memory = found["memory_gb"]
    measured = [key for key in memory if f"{key.removesuffix('_gb')}_predicted_gb" in memory]
    if measured:
        print("\n| phase | peak GB | predicted GB |\n|---|--:|--:|")
    for key in measured:
        name = key.removesuffix("_gb")
        print(f"| {name} | {memory[key]:.2f} | {memory[f'{name}_predicted_gb']:.2f} |")
    mfu, predicted = found["mfu_update_actor"], found["predicted_peak_gb"]
    print(f"\nMFU of the policy update {'unknown' if mfu is None else f'{mfu:.1%}'}; peak memory {found['peak_gb']:.1f} GB"
          + ("" if predicted is None else f", predicted {predicted:.1f} GB"))  # fmt: skip
