"""Plans against their bounds and known optima, up to 1,024 ranks, each in a fresh process."""

import argparse
import importlib.util
import json
import subprocess
import sys
from typing import Any, NamedTuple

from rl3d.bench import BenchError

HELP = "Bytes and seconds of plans: known optima, 64 to 1,024 ranks, and megatron-core's planner beside ours."


class Case(NamedTuple):
    """A pair of layouts with the GB per rank (10^9 bytes) that the best possible plan receives, where it is known.

    ``per_node`` GPUs share a node whatever ``--gpus-per-node`` says, where the known optimum depends on it.
    """

    model: str
    train: str
    gen: str
    gpus: int
    mean: float | None = None
    most: float | None = None
    per_node: int | None = None


# bf16, gate and up cut apart. From bounds that share no code with the planner (interval arithmetic and scipy's LP).
OPTIMA = (
    Case("llama2-7b", "tp2.pp2.dp2.zero1", "tp4", 8, 1.685, 1.685),
    Case("llama2-7b", "dp8.zero3", "tp8", 8, 1.065, 1.155),
    Case("llama2-7b", "dp8.zero3", "tp4", 8, 2.407, 2.524),
    Case("llama2-7b", "tp4.pp2.dp1.zero1", "tp2", 8, 5.054, 5.054),
    Case("llama2-70b", "tp8.dp8.zero1", "tp4", 64, 17.24, 17.24),
    Case("llama2-70b", "tp4.pp4.dp4.zero1", "tp8", 64, None, 12.966),
    Case("llama2-70b", "dp64.zero3", "tp8", 64, 15.949, 15.978, per_node=64),
    Case("llama2-70b", "dp64.zero3", "tp8", 64),
    Case("llama2-70b", "tp8.pp4.dp2.zero1", "tp4", 64, None, 30.211),
)  # fmt: skip
MEGATRON = (64, 128, 256)
"""Ranks at which megatron-core's planner is run beside ours; at 1,024 every rank needs minutes."""
SCALE = tuple(Case("llama2-70b", f"tp4.pp4.dp{gpus // 16}.zero1", "tp8", gpus) for gpus in (64, 128, 256, 512, 1024))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus-per-node", metavar="N", type=int, default=8, help="8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="the pairs of 8 GPUs only")


def run(args: argparse.Namespace) -> int:
    """Print the tables; the exit code is 1 when a plan receives more than its bound."""
    cases = [case for case in OPTIMA if case.gpus == 8] if args.quick else [*OPTIMA]
    optima = [(case, once(case, args.gpus_per_node)) for case in cases]
    scale = [] if args.quick else [(case, once(case, args.gpus_per_node)) for case in SCALE]
    beside = [(case, fact, megatron(case)) for case, fact in scale if case.gpus in MEGATRON and _has_megatron()]
    if args.json:
        theirs = [fact for _, _, fact in beside]
        print(json.dumps({"optima": [f for _, f in optima], "scale": [f for _, f in scale], "megatron-core": theirs}))
    else:
        _print("Received and sent, GB a rank", optima)
        if scale:
            _print("Scale: Llama-2-70B, all rows of all ranks, one core, a process of its own", scale)
        if beside:
            _print_beside(beside)
    exact = all(fact["received"]["max"] == fact["bounds"]["received"]["max"] for _, fact in (*optima, *scale))
    return 0 if exact else 1


def once(case: Case, per_node: int) -> dict[str, Any]:
    """Plan in a fresh process; what :mod:`rl3d.bench.plan_once` prints. Raises :class:`BenchError` when it fails."""
    return _run("plan_once", case.model, case.train, case.gen, str(case.gpus), str(case.per_node or per_node))


def megatron(case: Case) -> dict[str, Any]:
    """What megatron-core's planner does with the same layouts. Raises :class:`BenchError` when it fails."""
    return _run("megatron_planner", case.model, case.train, case.gen, str(case.gpus))


def _has_megatron() -> bool:
    return importlib.util.find_spec("megatron") is not None


def _run(module: str, *words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", f"rl3d.bench.{module}", *words], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"bench plan: {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _print(title: str, found: list[tuple[Case, dict[str, Any]]]) -> None:
    print(f"{title}\n")
    heads = (
        "model", "train", "generate", "ranks", "a node", "received mean", "max", "known mean", "max", "bound max",
        "sent max", "bound", "between nodes (all)", "received / bound", "sent / bound", "plan s", "process CPU s", "peak MB",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |\n" + "|---" * 3 + "|--:" * (len(heads) - 3) + "|")
    for case, fact in found:
        received, bound = fact["received"], fact["bounds"]["received"]["max"]
        ours = [received["mean"] / 1e9, received["max"] / 1e9]
        rest = (bound, fact["sent"]["max"], fact["bounds"]["sent"]["max"], fact["between_nodes"])
        gigabytes = [*ours, case.mean, case.most, *(x / 1e9 for x in rest)]
        cells = [case.model, case.train, case.gen, str(case.gpus), str(fact["gpus_per_node"])]
        cells += ["" if value is None else f"{value:.3f}" for value in gigabytes]
        cells += [f"{value:.2f}" for value in (*(fact["ratios"][key] for key in ("received", "sent")),
                                               fact["plan_seconds"], fact["cpu_seconds"])]  # fmt: skip
        print(f"| {' | '.join(cells)} | {fact['peak_bytes'] / 1e6:.0f} |", flush=True)
    print()


def _print_beside(found: list[tuple[Case, dict[str, Any], dict[str, Any]]]) -> None:
    print("Beside megatron-core's planner, Llama-2-70B tp4.pp4 -> tp8, GB a rank, CPU seconds of every rank\n")
    heads = ("ranks", "rl3d: plan s", "received mean", "max", "sent max",
             "megatron-core: plan s", "received mean", "max", "sent max")  # fmt: skip
    print("| " + " | ".join(heads) + " |\n" + "|--:" * len(heads) + "|")
    for case, ours, theirs in found:
        cells = [str(case.gpus)]
        for fact, seconds in ((ours, ours["cpu_seconds"]), (theirs, theirs["plan_seconds"])):
            gigabytes = (fact["received"]["mean"], fact["received"]["max"], fact["sent"]["max"])
            cells += [f"{seconds:.2f}", *(f"{value / 1e9:.3f}" for value in gigabytes)]
        print(f"| {' | '.join(cells)} |", flush=True)
