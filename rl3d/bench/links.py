"""Predicted against measured seconds over links whose rate is known: two network namespaces and a rate-limited pair."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl3d.bench import BenchError

HELP = "Check predicted seconds of moves against rate-limited links between two network namespaces (Linux, root)."
RANKS, PER_NODE = 4, 2
CASES = (
    ("tp2.pp2.zero1", "tp2"), ("tp2.pp2.zero1", "tp1"), ("tp4.zero1", "tp2"), ("tp4.zero1", "tp1"),
    ("tp1.pp4.zero1", "tp4"), ("tp1.zero3", "tp2"), ("tp2.zero1", "tp1"),
)  # fmt: skip
SHAPE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 2000, "rope_theta": 1e4,
}  # fmt: skip
FRAMING = 1448 / 1514
"""TCP payload of a full Ethernet frame; the limiter counts frames."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", metavar="N", type=int, default=200, help="rate of the link, Mbit/s (200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Start two ranks in each of two namespaces, move weights, and print each case's two times."""
    found = measure(args.mbit)
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"{found['parameters'] / 1e6:.1f}M parameters in bf16, {RANKS} ranks in two namespaces, {args.mbit} Mbit/s between"
    )
    print(
        f"inside a namespace {found['inside_gb_per_s']:.2f} GB/s, {found['inside_latency_us']:.0f} us a message (measured)\n"
    )
    print("| train | generate | MB between nodes | predicted ms | measured ms | measured / predicted |")
    print("|---|---|--:|--:|--:|--:|")
    for case in found["cases"]:
        predicted, measured = 1e3 * case["predicted"], 1e3 * case["measured"]
        print(f"| {case['train']} | {case['gen']} | {case['between_nodes'] / 1e6:.1f} | {predicted:.0f} | {measured:.0f} "
              f"| {measured / predicted:.2f} |")  # fmt: skip
    return 0


def measure(mbit: int) -> dict[str, Any]:
    """Rank 0's report: rates inside, and for each case bytes, predicted and measured seconds.

    Raises :class:`BenchError` without root, ``ip`` and ``tc``, or when a rank fails.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise BenchError(f"bench links makes network namespaces: it needs root, ip and tc (iproute2); missing: "
                         f"{', '.join([*missing, *(['root'] if os.geteuid() else [])])}")  # fmt: skip
    with _namespaces(mbit) as (spaces, address), tempfile.TemporaryDirectory(prefix="rl3d-links-") as scratch:
        ranks = [_start(spaces[rank // PER_NODE], address, rank, mbit, Path(scratch)) for rank in range(RANKS)]
        try:
            codes = [process.wait(timeout=300) for process in ranks]
        except subprocess.TimeoutExpired:
            raise BenchError("bench links: the ranks did not finish within 300 s") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            log = (Path(scratch) / f"{next(r for r, code in enumerate(codes) if code)}.log").read_text()
            raise BenchError(f"bench links: a rank failed:\n{log[-2000:]}")
        return json.loads((Path(scratch) / "report.json").read_text())


def _start(space: str, address: str, rank: int, mbit: int, scratch: Path) -> "subprocess.Popen[bytes]":
    env = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": address, "MASTER_PORT": "29611",
        "GLOO_SOCKET_IFNAME": "wire0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    words = ["ip", "netns", "exec", space, sys.executable, "-m", "rl3d.bench.links_rank", str(mbit), str(scratch)]
    with open(scratch / f"{rank}.log", "wb") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def _namespaces(mbit: int) -> Iterator[tuple[tuple[str, str], str]]:
    """Two namespaces of ours, joined by one link that passes ``mbit`` either way; gone afterwards."""
    spaces = (f"rl3d-{os.getpid()}-0", f"rl3d-{os.getpid()}-1")
    made: list[str] = []

    def ip(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"bench links: `{' '.join(words)}` failed: {done.stderr.strip()}")

    try:
        for space in spaces:
            ip("ip", "netns", "add", space)
            made.append(space)
        ip("ip", "link", "add", "wire0", "netns", spaces[0], "type", "veth", "peer", "name", "wire0", "netns", spaces[1])
        for number, space in enumerate(spaces, start=1):
            inside = ("ip", "-n", space)
            ip(*inside, "addr", "add", f"10.201.0.{number}/24", "dev", "wire0")
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "link", "set", "wire0", "up")
            limit = ("rate", f"{mbit}mbit", "burst", "128k", "latency", "200ms")
            ip("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "wire0", "root", "tbf", *limit)
        yield spaces, "10.201.0.1"
    finally:
        for space in made:
            subprocess.run(("ip", "netns", "del", space), capture_output=True)
