"""Switches of random weights between layouts, timed beside plain copies, an all-gather of everything and megatron-core."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rl3d.bench import BenchError

HELP = "Switch random weights between layouts: seconds, bytes and memory beside plain copies, all-gather, megatron-core."
TRANSPORTS = ("auto", "ipc", "shm", "nccl", "gloo")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="shipped shape (llama2-7b), config.json or directory")
    parser.add_argument("--train", nargs="+", required=True, metavar="LAYOUT",
                        help="training layouts, as in tp2.pp2.zero1; tp2.zero1:partitions for the parts that each rank of "
                        "ZeRO 1 or 2 has updated, before their all-gather")  # fmt: skip
    parser.add_argument("--gen", nargs="+", required=True, metavar="LAYOUT",
                        help="generation layouts, one for each of --train or one for all")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=8, help="ranks started on this machine; 8")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto",
                        help="auto: peers' memory (ipc on a GPU, shm on a CPU) where it can be mapped")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto")
    parser.add_argument("--staging-mib", type=int, default=48, metavar="N", help="cap on staging, MiB a direction; 48")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed moves of each kind, the median counts; 5")
    parser.add_argument("--shape", nargs="+", default=[], metavar="KEY=VALUE",
                        help="other values of the model's config.json, as in num_hidden_layers=4")  # fmt: skip
    parser.add_argument("--only-ours", action="store_true", help="leave all-gather and megatron-core out")
    parser.add_argument("--memory-limit-gb", type=float, metavar="N",
                        help="refuse pairs that want more of a device (a CPU's host) than this; what is free")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Start the ranks where they are not started yet; rank 0 prints each pair when it is done.

    The exit code is 1 when a fingerprint changed, or memory was too small for every pair.
    """
    pairs = pair_up(args.train, args.gen)
    if args.ranks > 1 and "RANK" not in os.environ:
        from rl3d.distributed.launcher import launch_local

        return launch_local(["-m", "rl3d", *sys.argv[1:]], args.ranks)
    from rl3d.bench.switch_rank import measure
    from rl3d.models.shapes import find_model

    name, config = find_model(args.model)

    def show(found: dict[str, Any], case: dict[str, Any] | None) -> None:
        if not args.json:
            print(_heading(name, found) if case is None else _row(case), flush=True)

    found = measure(config | shape_values(args.shape), pairs, args.transport, args.device, args.staging_mib << 20,
                    args.repeats, not args.only_ours, args.memory_limit_gb, show)  # fmt: skip
    if found is None:
        return 0
    if args.json:
        print(json.dumps({"model": name, **found}), flush=True)
    else:
        for note in found["notes"]:
            print(f"\n{note}")
    cases = found["cases"]
    return int(any(case["changed"] for case in cases) or all(case["refused"] for case in cases))


def pair_up(train: Sequence[str], gen: Sequence[str]) -> list[tuple[str, str]]:
    """Raises :class:`BenchError` for lists of different lengths, unless one has a single layout."""
    if len(train) != len(gen) and 1 not in (len(train), len(gen)):
        raise BenchError(f"bench switch: {len(train)} layouts for --train and {len(gen)} for --gen; give as many, or one")
    count = max(len(train), len(gen))
    return [(train[i % len(train)], gen[i % len(gen)]) for i in range(count)]


def shape_values(texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE with JSON values. Raises :class:`BenchError` for anything else."""
    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            raise BenchError(f"bench switch: --shape {text!r}; expected KEY=VALUE, as in num_hidden_layers=4") from None
    return out


def _heading(name: str, found: dict[str, Any]) -> str:
    heads = ("train", "generate", "transport", "received MB a rank", "ours ms", "back ms", "one plain copy ms",
             "plain peer copy ms", "ours / it", "all-gather ms", "megatron-core ms", "extra MB a rank", "staging MB",
             "fingerprints")  # fmt: skip
    return (f"{name}: {found['parameters'] / 1e6:.0f}M parameters in bf16, {found['ranks']} ranks, {found['device']}\n\n"
            "| " + " | ".join(heads) + " |\n" + "|---" * 3 + "|--:" * 10 + "|---|")  # fmt: skip


def _row(case: dict[str, Any]) -> str:
    cells = [case["train"], case["gen"]]
    if case["refused"]:
        return f"| {' | '.join(cells)} |" + " |" * 11 + f" not run: {case['refused']} |"
    seconds = case["seconds"]
    cells += [case["transport"], f"{case['received_max'] / 1e6:.1f}"]
    for key in ("ours", "back", "copy", "peer_copy", "ratio", "all_gather", "megatron_core"):
        value = seconds.get(key)
        if key == "ratio":
            cells.append(f"{seconds['ours'] / seconds['peer_copy']:.2f}" if "peer_copy" in seconds else "")
        else:
            cells.append("" if value is None else f"{1e3 * value:.1f}")
    cells += [f"{case['extra_bytes'] / 1e6:.1f}", f"{case['staging_bytes'] / 1e6:.1f}",
              "equal" if not case["changed"] else ", ".join(case["changed"])]  # fmt: skip
    return f"| {' | '.join(cells)} |"
