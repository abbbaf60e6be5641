"""The converter on a model of random weights: speed beside a plain copy of the files, and peak memory."""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl3d.bench import BenchError

HELP = "Speed and memory of HF -> Megatron and back, beside a plain copy, transformers, and Megatron-Bridge if installed."
_LAYER = 2048 * (2560 + 2048 + 3 * 5632) + 2 * 2048  # parameters of a layer of synthetic_config
_ENDS = 2 * 32000 * 2048 + 2048
LARGEST = 32000 * 2048 * 2
"""Bytes of the largest parameter of the synthetic model in bf16."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", metavar="GB", type=float, default=2.0, help="of weights in bf16 (2)")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="threads of the second run of each (2)")
    parser.add_argument("--dir", metavar="DIR", help="where to work; needs five times the room (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the table; the exit code is 1 when weights changed on the way."""
    with tempfile.TemporaryDirectory(prefix="rl3d-convert-", dir=args.dir) as scratch:
        found = measure(Path(scratch), args.gigabytes, args.jobs)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["same"] else 1


def synthetic_config(gigabytes: float) -> dict[str, Any]:
    """A llama of about this size in bf16 (10^9 bytes); its largest parameter is the embedding, :data:`LARGEST` bytes.

    Never fewer than the two layers that two stages want: 0.4 GB.
    """
    layers = max(2, round((gigabytes * 1e9 / 2 - _ENDS) / _LAYER))
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "dtype": "bfloat16",
    }  # fmt: skip


def make_checkpoint(directory: Path, gigabytes: float) -> int:
    """Write the synthetic model as safetensors into ``directory``; returns the bytes of its weights."""
    from rl3d.io.convert import megatron_to_hf
    from rl3d.io.random_reader import write_random_model

    with tempfile.TemporaryDirectory(dir=directory.parent) as drawn:
        write_random_model(drawn, synthetic_config(gigabytes))
        return megatron_to_hf(drawn, directory, dtype="bfloat16")["bytes"]


def measure(root: Path, gigabytes: float, jobs: int) -> dict[str, Any]:
    """Everything, each in a fresh process. Raises :class:`BenchError` when one fails."""
    size = make_checkpoint(root / "hf", gigabytes)
    rows: list[dict[str, Any]] = []

    def add(name: str, work: str, src: str, dst: str, *options: str) -> None:
        rows.append({"name": name, **once(work, root / src, root / dst, *options)})

    add("plain copy of the files", "copy", "hf", "copy")
    for count in dict.fromkeys((1, jobs)):
        add(f"HF -> Megatron, {count} job(s)", "import", "hf", f"m{count}", f"jobs={count}")
        add(f"Megatron -> HF, {count} job(s)", "export", f"m{count}", f"back{count}", f"jobs={count}")
    add("Megatron -> Megatron, tp 2, pp 2", "reshard", "m1", "cut", "tp=2", "pp=2")
    add("transformers: load, save", "transformers", "hf", "whole")
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge"):
        try:
            add("Megatron-Bridge: HF -> Megatron", "bridge", "hf", "bridge")
        except BenchError as error:  # it wants CUDA and more than its package; the rest of the table stands
            rows.append({"name": "Megatron-Bridge: HF -> Megatron", "error": str(error).splitlines()[-1]})
    kept = [(root / name / "model.safetensors").read_bytes() for name in ("hf", "back1")]
    return {"bytes": size, "largest": LARGEST, "rows": rows, "same": kept[0] == kept[1]}


def once(work: str, src: Path, dst: Path, *options: str) -> dict[str, Any]:
    """One conversion in a fresh process: what :mod:`rl3d.bench.convert_once` prints."""
    words = [sys.executable, "-m", "rl3d.bench.convert_once", work, str(src), str(dst), *options]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"bench convert: {work} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _print(found: dict[str, Any]) -> None:
    size, largest = found["bytes"], found["largest"]
    print(f"{size / 1e9:.2f} GB of bf16 weights, largest parameter {largest / 1e6:.0f} MB; every row a fresh process\n")
    print("| | seconds | GB/s | CPU seconds | peak anonymous memory, MB | of the largest parameter |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in found["rows"]:
        if "error" in row:
            print(f"| {row['name']} | failed: {row['error']} | | | | |")
            continue
        speed, peak = size / 1e9 / row["seconds"], row["peak_bytes"]
        cpu = row["cpu_seconds"]
        print(
            f"| {row['name']} | {row['seconds']:.1f} | {speed:.2f} | {cpu:.1f} | {peak / 1e6:.0f} | {peak / largest:.2f} |"
        )
    print(f"\nafter the way there and back the files are {'the same' if found['same'] else 'DIFFERENT'}, byte for byte")
