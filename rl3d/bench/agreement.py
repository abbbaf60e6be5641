"""How far sampled tokens and their log-probabilities depend on what they should not: the batch, the order, TP.

The same requests are generated in different ways, beside one reference. Once a token differs the rest of a sequence is
another text, so each sequence is compared up to its first different token, that one included.
"""

import argparse
import gc
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl3d.bench import BenchError, positive_numbers

HELP = "The same requests in batches of other sizes, in another order, on other TP: tokens that differ, log-probabilities."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory with weights; shape or config.json: random ones")
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="32")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of the longest prompt; 64")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="tokens generated for each; 128")
    parser.add_argument("--slots", default="1,8", metavar="N,N", help="sequences that run at once, beside all of them; 1,8")
    parser.add_argument("--tp", default="1", metavar="N,N",
                        help="the first is the reference; as many ranks as the largest are started here; 1")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; 1")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="bfloat16 on CUDA, float32 on a CPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto")
    parser.add_argument("--shape", nargs="+", default=[], metavar="KEY=VALUE",
                        help="other values of the model's config.json, for random weights")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True)
class Way:
    """How the requests are generated: TP, sequences that run at once, and whether they come in another order."""

    tp: int
    slots: int
    shuffled: bool = False


def ways(tps: list[int], slots: list[int], prompts: int) -> list[Way]:
    """The reference, then one thing changed at a time."""
    first = tps[0]
    other = [Way(first, n) for n in slots if n != prompts]
    return [Way(first, prompts), Way(first, prompts, shuffled=True), *other, *(Way(tp, prompts) for tp in tps[1:])]


def compare(reference: list[tuple[list[int], list[float]]], found: list[tuple[list[int], list[float]]]) -> dict[str, float]:
    """Sequences that differ, different first tokens in a thousand compared, and the mean and largest difference of
    log-probabilities among tokens that are equal; each sequence as (token ids, log-probabilities)."""
    differ, compared, gaps = 0, 0, []
    for (right, right_logprobs), (mine, logprobs) in zip(reference, found, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(right, mine)) if a != b), min(len(right), len(mine)))
        gaps += [abs(a - b) for a, b in zip(right_logprobs[:same], logprobs[:same])]
        differ += right != mine
        compared += same + (right != mine)
    return {"sequences": differ, "flips_per_thousand": 1000 * differ / max(compared, 1), "tokens": compared,
            "logprob_mean": sum(gaps) / max(len(gaps), 1), "logprob_max": max(gaps, default=0.0)}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Start the ranks where they are not started yet; rank 0 prints."""
    tps, slots = (list(dict.fromkeys(positive_numbers(getattr(args, name), f"bench agreement: --{name}")))
                  for name in ("tp", "slots"))  # fmt: skip
    ranks = max(tps)
    if any(ranks % tp for tp in tps):
        raise BenchError(f"bench agreement: --tp {args.tp}; each must divide the largest")
    if args.prompts < 2 or args.prompt_len < 2 or args.new < 1:
        raise BenchError(f"bench agreement: --prompts {args.prompts} --prompt-len {args.prompt_len} --new {args.new}; "
                         f"expected 2 or more prompts, the longest of 2 or more tokens, 1 or more new ones")  # fmt: skip
    if ranks > 1 and "RANK" not in os.environ:
        from rl3d.distributed.launcher import launch_local

        return launch_local(["-m", "rl3d", *sys.argv[1:]], ranks)
    with tempfile.TemporaryDirectory(prefix="rl3d-bench-") as scratch:
        found = _measure(args, ways(tps, slots, args.prompts), Path(scratch))
    if found is not None:
        print(json.dumps(found)) if args.json else _print(found)
    return 0


def _directory(args: argparse.Namespace, scratch: Path) -> tuple[str, Path]:
    """The model's name, and a directory that has or stands for its weights."""
    from rl3d.bench.switch import shape_values
    from rl3d.io import write_random_model
    from rl3d.models.shapes import find_model

    if Path(args.model).is_dir() and next(Path(args.model).glob("*.safetensors"), None) is not None:
        if args.shape:
            raise BenchError(f"bench agreement: --shape is for random weights, {args.model} has weights")
        return Path(args.model).name, Path(args.model)
    name, config = find_model(args.model)
    return f"{name}, random weights", write_random_model(scratch / "model", config | shape_values(args.shape))


def _measure(args: argparse.Namespace, chosen: list[Way], scratch: Path) -> dict[str, Any] | None:
    import torch

    from rl3d.distributed import bootstrap, failures
    from rl3d.distributed.groups import GroupRegistry, generation_groups
    from rl3d.generation.load import load_engine
    from rl3d.generation.megatron import MegatronGenerator
    from rl3d.layout import GenMesh
    from rl3d.models import Architecture
    from rl3d.models.build import check_tensor_parallel

    name, directory = _directory(args, scratch)
    runtime = bootstrap.init(device=args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if runtime.device.type == "cuda" else "float32"))
    arch, longest = Architecture.from_hf(directory), args.prompt_len + args.new
    for tp in dict.fromkeys(way.tp for way in chosen):
        check_tensor_parallel(arch, tp, "--tp")
    vocab_size = arch.vocab_size
    requests = _requests(args, vocab_size)
    results: dict[Way, Any] = {}
    close = 0
    ranks = tuple(range(runtime.world_size))
    with failures.guard(runtime):
        for tp in dict.fromkeys(way.tp for way in chosen):
            groups = generation_groups(GenMesh(tp, ranks).groups(), GroupRegistry(runtime.timeout_s))
            assert groups is not None, "every rank belongs to a replica"
            settings: dict[str, Any] = {"max_sequence_length": longest, "device": runtime.device, "dtype": dtype}
            first: Any = load_engine("megatron", directory, groups, max_sequences=args.prompts, **settings)
            for way in (way for way in chosen if way.tp == tp):
                engine = first
                if way.slots != args.prompts:
                    engine = MegatronGenerator(first.model, groups.tp, vocab_size, max_sequences=way.slots, **settings)
                    engine.weights_version = 0
                order = random.Random(1).sample(range(args.prompts), args.prompts) if way.shuffled else range(args.prompts)
                answers = engine.generate([requests[i] for i in order])
                placed = dict(zip(order, answers, strict=True))
                results[way] = [(placed[i].token_ids, placed[i].logprobs) for i in range(args.prompts)]
                if way == chosen[0]:
                    close = sum(answer.small_margins for answer in answers)
                engine.drop_cache()
            del first, engine
            gc.collect()
    if runtime.rank > 0:
        return None
    reference = results[chosen[0]]
    rows = [{"tp": w.tp, "slots": w.slots, "shuffled": w.shuffled, **compare(reference, results[w])} for w in chosen[1:]]
    return {
        "model": name, "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."), "temperature": args.temperature, "prompts": args.prompts,
        "drawn": sum(len(ids) for ids, _ in reference), "close": close, "tp": chosen[0].tp, "rows": rows,
    }  # fmt: skip


def _requests(args: argparse.Namespace, vocab_size: int) -> list[Any]:
    """Prompts of random tokens, of different lengths."""
    from rl3d.generation import Request, SamplingParams

    drawn, params = random.Random(0), SamplingParams(args.new, temperature=args.temperature)
    return [
        Request([drawn.randrange(vocab_size) for _ in range(max(1, args.prompt_len - i % 7))], params, key=(0, i, 0))
        for i in range(args.prompts)
    ]


def _print(found: dict[str, Any]) -> None:
    print(f"{found['model']}, {found['dtype']}, {found['device']}, temperature {found['temperature']:g}: {found['prompts']} "
          f"prompts, {found['drawn']} tokens drawn, {found['close']} of them within 1e-5 of another; beside TP "
          f"{found['tp']} with all prompts at once\n")  # fmt: skip
    print("| TP | at once | order | sequences that differ | flips in 1,000 tokens | mean difference of log-probabilities | "
          "largest |")  # fmt: skip
    print("|--:|--:|---|--:|--:|--:|--:|")
    for row in found["rows"]:
        print(f"| {row['tp']} | {row['slots']} | {'another' if row['shuffled'] else 'the same'} | {row['sequences']} | "
              f"{row['flips_per_thousand']:.2f} | {row['logprob_mean']:.1e} | {row['logprob_max']:.1e} |")  # fmt: skip
