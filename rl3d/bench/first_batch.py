"""The first batch after a switch beside those that follow it, and the time from an update to the first token."""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl3d.bench import BenchError

_TELL_EVERY = 10.0  # seconds
HELP = "Tokens per second of the first batch after a switch beside later ones; seconds from an update to the first token."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="shipped shape (qwen2.5-0.5b), config.json or directory")
    parser.add_argument("--train", default="tp1.pp1.zero1", metavar="LAYOUT", help="tp1.pp1.zero1")
    parser.add_argument("--gen", default="tp1", metavar="LAYOUT", help="tp1")
    parser.add_argument("--ranks", type=int, default=1, help="ranks started on this machine; 1")
    parser.add_argument("--batch", type=int, default=8, help="prompts in a batch of each replica; 8")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens; 64")
    parser.add_argument("--response-len", type=int, default=64, metavar="N", help="tokens; 64")
    parser.add_argument("--rounds", type=int, default=5, help="updates and switches measured, after one that warms up; 5")
    parser.add_argument("--later", type=int, default=3, help="batches after the first of each round; 3")
    parser.add_argument("--transport", choices=("auto", "peer", "p2p"), default="auto", help="auto")
    parser.add_argument("--cache-strategy", choices=("adaptive", "full", "lightweight"), default="full",
                        help="of the key/value cache; with full its memory stays while training; full")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto")
    parser.add_argument("--shape", nargs="+", default=[], metavar="KEY=VALUE",
                        help="other values of the model's config.json, as in num_hidden_layers=4")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Start the ranks where they are not started yet; rank 0 prints."""
    if args.rounds < 1 or args.later < 1:
        raise BenchError(f"bench first_batch: --rounds {args.rounds} --later {args.later}; expected 1 or more of each")
    if args.ranks > 1 and "RANK" not in os.environ:
        from rl3d.distributed.launcher import launch_local

        return launch_local(["-m", "rl3d", *sys.argv[1:]], args.ranks)
    from rl3d.bench.switch import shape_values
    from rl3d.models.shapes import find_model

    name, config = find_model(args.model)
    with tempfile.TemporaryDirectory(prefix="rl3d-bench-") as scratch:
        found = _measure(args, config | shape_values(args.shape), Path(scratch))
    if found is None:
        return 0
    found = {"model": name, "train": args.train, "gen": args.gen, **found}
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{name}, {args.train} -> {args.gen}, {found['ranks']} x {found['device']}, {args.batch} x ({args.prompt_len} + "
          f"{args.response_len}) tokens a batch and replica\n\n| first batch, tokens/s | later batches, tokens/s | first / "
          f"later | update to first token, ms | of it the switch, ms |\n|--:|--:|--:|--:|--:|")  # fmt: skip
    print(f"| {found['first']:.0f} | {found['later']:.0f} | {found['ratio']:.3f} | {1e3 * found['first_token_s']:.1f} | "
          f"{1e3 * found['switch_s']:.1f} |")  # fmt: skip
    used = found["memory_gb"]
    print(f"\nMemory in use between rounds: {used[0]:.3f} GB after the first, {used[-1]:.3f} after the last of {len(used)}, "
          f"{max(used):.3f} at most")  # fmt: skip
    return 0


def _measure(args: argparse.Namespace, hf_config: dict[str, Any], scratch: Path) -> dict[str, Any] | None:
    """Medians over the rounds, of the slowest rank each time; on rank 0, elsewhere ``None``."""
    import torch
    import torch.distributed as dist

    from rl3d.bench.synthetic import RandomPrompts
    from rl3d.config import PPOConfig
    from rl3d.distributed import bootstrap, failures
    from rl3d.engine.actor import Actor
    from rl3d.generation.engine import Request, SamplingParams
    from rl3d.io import write_random_model

    model = write_random_model(scratch / "model", hf_config)
    runtime = bootstrap.init(timeout_s=600, device=args.device)
    with failures.guard(runtime):
        actor = Actor(str(model), train=args.train, gen=args.gen, device=args.device, transport=args.transport,
                      algorithm=PPOConfig(batch_size=args.batch, mini_batch_size=args.batch, kl_coef=0.0),
                      max_sequence_length=args.prompt_len + args.response_len, max_sequences=args.batch,
                      cache_strategy=args.cache_strategy)  # fmt: skip
        replicas = actor.settings.gen.replicas(runtime.world_size)
        stream = RandomPrompts(args.batch * replicas, args.prompt_len, actor.parts.arch.vocab_size)
        params = SamplingParams(args.response_len, 1.0, 1.0, 0, stop_token_ids=(), seed=0)
        count = args.batch * replicas * args.response_len

        def largest(value: float) -> float:
            took = torch.tensor([value], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=runtime.cpu_group)
            return took.item()

        def batch(number: int) -> tuple[float, float]:
            """Seconds of a batch of new prompts, and until its first token."""
            prompts = stream.next_batch()
            share = actor.replica_share(len(prompts))
            requests = [Request(prompts[i].token_ids, params, (number, i, 0)) for i in share]
            runtime.barrier()
            first: list[float] = []

            def stepped(progress: Any) -> None:
                if not first:
                    first.append(time.perf_counter())

            start = time.perf_counter()
            actor.sample(requests, on_step=stepped)
            whole = time.perf_counter() - start
            return largest(whole), largest((first[0] if first else time.perf_counter()) - start)

        ids = torch.tensor([p.token_ids for p in stream.next_batch()])
        rollout = actor.rollout(ids, max_new_tokens=args.response_len, stop_token_ids=[])
        rewards = torch.arange(float(len(ids)))
        firsts, later, ratios, tokens, switches, memory = [], [], [], [], [], []
        told = time.perf_counter()
        for round_ in range(args.rounds + 1):
            actor.update(rollout.sequences, rewards, rollout.logprobs)
            runtime.barrier()
            start = time.perf_counter()
            actor.switch_to_generation()
            switch = largest(time.perf_counter() - start)
            first, token = batch(1000 * round_)
            after = [batch(1000 * round_ + i)[0] for i in range(1, args.later + 1)]
            actor.switch_to_training()
            runtime.barrier()
            if round_:
                memory.append(largest(_used(runtime.device)))
                firsts.append(count / first)
                later += [count / seconds for seconds in after]
                ratios.append(statistics.median(after) / first)
                tokens.append(switch + token)
                switches.append(switch)
                if runtime.rank == 0 and (round_ == args.rounds or time.perf_counter() - told > _TELL_EVERY):
                    told = time.perf_counter()
                    sys.stderr.write(f"round {round_} of {args.rounds}: first batch {firsts[-1]:,.0f} tokens/s, "
                                     f"{memory[-1] / 1e9:.3f} GB in use\n")  # fmt: skip
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU"
        found = {"device": device, "ranks": runtime.world_size, "first": statistics.median(firsts),
                 "later": statistics.median(later), "ratio": statistics.median(ratios),
                 "first_token_s": statistics.median(tokens), "switch_s": statistics.median(switches),
                 "memory_gb": [round(nbytes / 1e9, 4) for nbytes in memory]}  # fmt: skip
        return found if runtime.rank == 0 else None


def _used(device: Any) -> float:
    """Bytes in use on the GPU, by whatever process; of this process on a CPU."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
