"""Generation with random weights of a given shape: tokens per second, time to first token, shares of what the device can do.

Every number comes from whole calls of the engine that rollouts use, sampling and scheduling included.
"""

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rl3d.bench import BenchError, positive_numbers

HELP = "Generation with random weights of a shape: tokens/s, time to first token, share of bandwidth and matrix peak."
ENGINES = ("megatron", "hf")
_WARM_TOKENS = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="shipped shape (qwen2.5-1.5b), config.json or directory")
    parser.add_argument("--batch", default="1,32,128,256", metavar="N,N", help="sequences at once; 1,32,128,256")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of each prompt; 512")
    parser.add_argument("--new", type=int, default=256, metavar="N", help="tokens generated for each; 256")
    parser.add_argument("--ends", type=int, default=0, metavar="N",
                        help="end sequences at random, after N tokens on average if --new allows; 0 ends none")  # fmt: skip
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="sequences that run at once; all of a batch")
    parser.add_argument("--engine", default="megatron", metavar="NAME,NAME", help="megatron (rl3d's own), hf; megatron")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, started on this machine; 1")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; 1")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 turns it off; 1")
    parser.add_argument("--top-k", type=int, default=0, help="0 turns it off; 0")
    parser.add_argument("--prefill-tokens", type=int, default=16384, metavar="N", help="prompt tokens a pass; 16384")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="bfloat16 on CUDA, float32 on a CPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Start the ranks where they are not started yet; rank 0 prints the table."""
    engines, batches = args.engine.split(","), positive_numbers(args.batch, "bench generate: --batch")
    if unknown := set(engines) - set(ENGINES):
        raise BenchError(f"bench generate: --engine {', '.join(sorted(unknown))}; expected some of {', '.join(ENGINES)}")
    if args.ends < 0 or args.slots < 0:
        raise BenchError(f"bench generate: --ends {args.ends} --slots {args.slots}; expected 0 or more")
    if args.new < 8:
        raise BenchError(f"bench generate: --new {args.new}; give 8 or more, the first tokens are not decode steps")
    if "hf" in engines and args.tp > 1:
        raise BenchError("bench generate: --engine hf runs on one device; give --tp 1 or leave it out")
    if "hf" in engines and (args.ends or args.slots):
        raise BenchError("bench generate: --ends and --slots are of the engine megatron; leave hf out")
    if args.tp > 1 and "RANK" not in os.environ:
        from rl3d.distributed.launcher import launch_local

        return launch_local(["-m", "rl3d", *sys.argv[1:]], args.tp)
    from rl3d.models.shapes import find_model

    name, config = find_model(args.model)
    found = _measure(args, name, config, engines, batches)
    if found is not None:
        print(json.dumps(found)) if args.json else _print(found)
    return 0


@dataclass
class _Clock:
    """Times of a call's steps, as the engine reports them."""

    samples: int
    device: Any
    start: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)  # (seconds, tokens drawn so far)

    def __post_init__(self) -> None:
        self.start = self.now()

    def now(self) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step(self, progress: Any) -> None:
        # the engine has the step's tokens on the host: whatever runs beyond it belongs to the next
        self.steps.append((time.perf_counter() - self.start, progress.tokens))

    def report(self) -> dict[str, float]:
        """Total and decode-only tokens per second, and seconds until the first token and until all have theirs."""
        seconds = self.now() - self.start
        total = self.steps[-1][1]
        prefill, drawn = next((t, n) for t, n in self.steps if n >= self.samples)
        return {"seconds": seconds, "tokens_per_second": total / seconds, "first_token_s": self.steps[0][0],
                "prefill_s": prefill, "decode_tokens_per_second": (total - drawn) / (seconds - prefill),
                "decode_step_s": (seconds - prefill) * self.samples / (total - drawn)}  # fmt: skip


def _measure(args: argparse.Namespace, name: str, hf_config: dict[str, Any], engines: list[str],
             batches: list[int]) -> dict[str, Any] | None:  # fmt: skip
    import torch

    from rl3d.distributed import bootstrap, failures
    from rl3d.models import Architecture

    runtime = bootstrap.init(device=args.device)
    arch = Architecture.from_hf(hf_config)
    dtype = getattr(torch, args.dtype or ("bfloat16" if runtime.device.type == "cuda" else "float32"))
    if args.prompt + args.new > arch.max_positions:
        raise BenchError(
            f"bench generate: --prompt {args.prompt} + --new {args.new} exceed the {arch.max_positions} positions of {name}"
        )
    device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU"
    rows: list[dict[str, Any]] = []
    with failures.guard(runtime):
        if "megatron" in engines:
            rows += _own(args, arch, batches, dtype, runtime, device)
        if "hf" in engines:
            rows += _hf(args, hf_config, batches, dtype, runtime.device)
    if runtime.rank > 0:
        return None
    return {"model": name, "device": device, "tp": args.tp, "dtype": str(dtype).removeprefix("torch."),
            "prompt": args.prompt, "new": args.new, "temperature": args.temperature, "top_p": args.top_p,
            "top_k": args.top_k, "rows": rows}  # fmt: skip


class _Requests:
    """Prompts of random tokens, never the same twice: a cache of prefixes has nothing to find."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self.args, self.vocab_size, self.random, self.count = args, vocab_size, random.Random(0), 0

    def __call__(self, batch: int, new: int) -> list[Any]:
        from rl3d.generation import Request, SamplingParams

        args = self.args
        # random weights draw every token about as often
        stops = tuple(range(self.vocab_size // args.ends)) if args.ends else ()
        params = SamplingParams(new, args.temperature, args.top_p, args.top_k, stop_token_ids=stops)
        out = []
        for _ in range(batch):
            self.count += 1
            ids = [self.random.randrange(self.vocab_size) for _ in range(args.prompt)]
            out.append(Request(ids, params, key=(0, self.count, 0)))
        return out


def _own(args: argparse.Namespace, arch: Any, batches: list[int], dtype: Any, runtime: Any,
         device_name: str) -> list[dict[str, Any]]:  # fmt: skip
    import torch

    from rl3d.distributed.groups import GroupRegistry, generation_groups
    from rl3d.estimate.flops import forward_flops, peak_bandwidth, peak_flops
    from rl3d.generation import CachedSelfAttention, MegatronGenerator
    from rl3d.layout import GenMesh
    from rl3d.models.build import build_model

    device = runtime.device
    ranks = tuple(range(runtime.world_size))
    groups = generation_groups(GenMesh(args.tp, ranks).groups(), GroupRegistry(runtime.timeout_s))
    assert groups is not None, "every rank belongs to a replica"
    model: Any = build_model(arch, groups, padded_vocab=arch.padded_vocab(args.tp), dtype=dtype, device=device,
                             mode="generate", self_attention=CachedSelfAttention)  # fmt: skip
    _randomize(model)
    generator = MegatronGenerator(
        model, groups.tp, arch.vocab_size, max_sequences=args.slots or max(batches), device=device, dtype=dtype,
        max_sequence_length=args.prompt + args.new, max_prefill_tokens=max(args.prefill_tokens, args.prompt),
        cache_strategy="full",
    )  # fmt: skip
    generator.weights_version = 0
    requests = _Requests(args, arch.vocab_size)
    weights = sum(p.nbytes for p in model.parameters())
    if not arch.tied:
        weights -= model.embedding.word_embeddings.weight.nbytes  # of which a step reads one row a sequence
    token = (
        2
        * arch.num_layers
        * (arch.num_kv_heads // args.tp if arch.num_kv_heads >= args.tp else 1)
        * arch.head_dim
        * dtype.itemsize
    )
    rows = []
    for batch in batches:
        generator.generate(requests(batch, _WARM_TOKENS))

        def call(new: int = args.new, batch: int = batch) -> dict[str, float]:
            asked = requests(batch, new)  # before the clock starts: half a thousand random numbers a prompt take their time
            clock = _Clock(batch, device)
            generator.generate(asked, on_step=clock.on_step)
            return clock.report()

        if args.ends or args.slots:  # many widths of a batch, each of which is captured once
            call()
            clocked = call()
            rows.append({"engine": "megatron", "batch": batch, "batches": generator.counts.batches} | {
                key: clocked[key] for key in ("seconds", "tokens_per_second", "first_token_s")
            })  # fmt: skip
            continue
        row, eager = call(), None
        if generator.runner is not None and generator.runner.graphs:
            generator.runner.graphs = False
            eager = call(min(args.new, 32))["decode_step_s"]
            generator.runner.graphs = True
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        updated = call()
        read = weights + batch * token * (args.prompt + args.new / 2)
        flops = forward_flops(arch, [args.prompt] * batch, batch) / args.tp
        bandwidth, peak = peak_bandwidth(device_name), peak_flops(device_name)
        rows.append({
            "engine": "megatron", "batch": batch, **row,
            "bandwidth_share": None if bandwidth is None else read / row["decode_step_s"] / bandwidth,
            "matrix_share": None if peak is None else flops / row["prefill_s"] / peak,
            "sampling_share": _sampling_seconds(args, generator, batch) / row["decode_step_s"],
            "eager_step_s": eager,
            "after_update": updated["tokens_per_second"] / row["tokens_per_second"],
        })  # fmt: skip
    return rows


def _randomize(model: Any) -> None:
    """Weights made where they stay; norms keep their ones, biases are not initialised yet."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()


def _sampling_seconds(args: argparse.Namespace, generator: Any, batch: int) -> float:
    """Seconds of the draw alone, at the shapes of a step."""
    import torch

    from rl3d.generation.sampler import SamplingBatch

    device, repeats = generator.device, 20
    sampling = SamplingBatch.build(list(range(batch)), [args.temperature] * batch, [args.top_p] * batch,
                                   [args.top_k] * batch, device)  # fmt: skip
    positions = torch.full((batch,), args.prompt, device=device)
    rows = generator.model.vocab_size // args.tp
    logits = torch.randn(batch, rows, device=device)
    generator.sampler.draw(logits, sampling, positions)

    def draw() -> None:
        generator.sampler.draw(logits, sampling, positions)

    if generator.runner is not None and generator.runner.graphs:
        graph = torch.cuda.CUDAGraph()  # as the step has it
        with torch.cuda.graph(graph):
            draw()
        draw = graph.replay
    clock = _Clock(batch, device)
    for _ in range(repeats):
        draw()
    return (clock.now() - clock.start) / repeats


def _hf(args: argparse.Namespace, hf_config: dict[str, Any], batches: list[int], dtype: Any,
        device: Any) -> list[dict[str, Any]]:  # fmt: skip
    """``model.generate()`` of transformers, warm, with its own sampling."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    sampling: dict[str, Any] = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    rows = []
    for batch in batches:
        ids = torch.randint(config.vocab_size, (batch, args.prompt), device=device)

        def call(new: int, ids: Any = ids) -> float:
            clock = _Clock(1, device)
            with torch.no_grad():
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                               pad_token_id=0, **sampling)  # fmt: skip
            return clock.now() - clock.start

        call(_WARM_TOKENS)
        first, seconds = call(1), call(args.new)
        rows.append({"engine": "hf", "batch": batch, "seconds": seconds, "tokens_per_second": batch * args.new / seconds,
                     "first_token_s": first, "prefill_s": first,
                     "decode_tokens_per_second": batch * (args.new - 1) / (seconds - first),
                     "decode_step_s": (seconds - first) / (args.new - 1)})  # fmt: skip
    return rows


_COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"), ("decode tokens/s", "decode_tokens_per_second", "{:,.0f}"),
    ("step ms", "decode_step_s", "ms"), ("without graphs", "eager_step_s", "ms"), ("first token ms", "first_token_s", "ms"),
    ("prefill ms", "prefill_s", "ms"), ("bandwidth", "bandwidth_share", "{:.0%}"),
    ("matrix peak", "matrix_share", "{:.0%}"), ("sampling", "sampling_share", "{:.1%}"), ("batches", "batches", "{}"),
    ("after update", "after_update", "{:.1%}"),
)  # fmt: skip


def _print(found: dict[str, Any]) -> None:
    print(f"{found['model']}, {found['dtype']}, {found['tp']} x {found['device']}, prompt {found['prompt']}, "
          f"{found['new']} new tokens, temperature {found['temperature']:g}, top-p {found['top_p']:g}, "
          f"top-k {found['top_k']}\n")  # fmt: skip
    columns = [c for c in _COLUMNS if any(row.get(c[1]) is not None for row in found["rows"])]
    print("| engine | batch | " + " | ".join(title for title, _, _ in columns) + " |\n|---|" + "--:|" * (len(columns) + 1))
    for row in found["rows"]:
        cells = []
        for _, key, form in columns:
            value = row.get(key)
            cells.append("" if value is None else f"{1e3 * value:.2f}" if form == "ms" else form.format(value))
        print(f"| {row['engine']} | {row['batch']} | " + " | ".join(cells) + " |")
