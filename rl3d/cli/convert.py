"""``rl3d convert``: Hugging Face -> Megatron, Megatron -> Hugging Face, and proof that nothing changed on the way."""

import argparse
import json
import os
import sys
from typing import Any

from rl3d.cli.arguments import UsageError, command, positive

DIFFERENT = 1
_MOST_JOBS = 4  # unless asked for more: each holds a parameter
_CODES = (
    "Exit codes: 0 done; 1 verify found differences, or an unforeseen failure; 2 refused, nothing written; 130 interrupted."
)


def add(commands: Any) -> None:
    sub = command(
        commands, "convert", run, "Convert checkpoints: HF -> Megatron, Megatron -> HF; inspect and verify them.", _CODES
    )
    declare(sub)


def declare(parser: argparse.ArgumentParser) -> None:
    """The commands below ``convert``."""
    parser.set_defaults(parser=parser, work=None)
    works = parser.add_subparsers(metavar="WORK", title="works")

    def work(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = works.add_parser(name, help=text, description=f"{text} {_CODES}")
        sub.set_defaults(work=function)
        return sub

    into = work("import", _import, "HF -> Megatron: a torch_dist directory that megatron-core loads at any layout.")
    into.add_argument(
        "source", metavar="SRC", help="Hugging Face directory (safetensors or .bin), GGUF file, or rl3d checkpoint"
    )
    out = work("export", _export, "Megatron -> HF: a directory that transformers and vLLM load.")
    out.add_argument("source", metavar="SRC", help="Megatron torch_dist directory, rl3d checkpoint, .bin or GGUF")
    recut = work("reshard", _reshard, "Megatron -> Megatron: cut as the ranks of another layout would have saved it.")
    recut.add_argument("source", metavar="SRC", help="Megatron torch_dist directory, or the weights of an rl3d checkpoint")
    for sub in (out, recut):
        sub.add_argument("--hf", metavar="DIR", help="config.json and tokenizer, for a checkpoint that has none beside it")
    for sub in (into, recut):
        for size, text in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            sub.add_argument(
                f"--{size}",
                type=positive,
                default=1,
                metavar="N",
                help=f"{text}-parallel size that the files are cut for (default 1; any size loads any cut)",
            )
        sub.add_argument("--vocab-multiple", type=positive, default=128, metavar="N",
                         help="pad the vocabulary to a multiple (make-vocab-size-divisible-by; default 128)")  # fmt: skip
    for sub in (into, out, recut):
        sub.add_argument("target", metavar="DST", help="directory to make; it appears when it is complete")
        sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the result (default: as stored)")
        sub.add_argument(
            "--max-shard-size", metavar="SIZE", default="5GB", help="begin another file after this (default 5GB)"
        )
        sub.add_argument("--jobs", type=positive, default=min(_MOST_JOBS, len(os.sched_getaffinity(0))), metavar="N",
                         help="parameters in memory at a time, each read and written by a thread (default: one for each "
                         f"core, {_MOST_JOBS} at most)")  # fmt: skip
        sub.add_argument("--dry-run", action="store_true", help="prove that it can be done, say what would be written")
        sub.add_argument("--resume", action="store_true", help="take up what a killed conversion left")
        sub.add_argument("--overwrite", action="store_true", help="replace DST, once the new one is complete")
    look = work("inspect", _inspect, "Format, layout, shapes, dtypes, bytes and fingerprints of a checkpoint.")
    same = work("verify", _verify, "Whether A and B hold the same model, bit for bit or within a tolerance, in any formats.")
    for sub in (look, same):
        sub.add_argument("first", metavar="A", help="Hugging Face or torch_dist directory, GGUF file, or rl3d checkpoint")
        sub.add_argument("--hf", metavar="DIR", help="config.json for a Megatron checkpoint that has none beside it")
        sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="read as (default: as stored)")
    same.add_argument("second", metavar="B", nargs="?", help="left out: compare A with what its conversion recorded")
    same.add_argument("--rtol", type=float, metavar="X", help="values may differ by X times those of B (default: no bit)")
    same.add_argument("--atol", type=float, metavar="X", help="values may differ by X; log-probabilities too (1e-4)")
    same.add_argument("--logits", metavar="FILE|TEXT", help="compare next-token log-probabilities in fp32 on this text, or "
                      "on each line of the file: HF through transformers, Megatron through megatron-core")  # fmt: skip
    look.add_argument("--fingerprints", action="store_true", help="read every value, too")
    look.add_argument("--json", action="store_true", help="print everything as JSON")
    work("families", _families, "Model families that can be converted.")


def run(args: argparse.Namespace) -> int:
    from rl3d.io.pages import use_huge_pages

    if args.work is None:
        args.parser.print_help()
        return 2
    use_huge_pages()
    return args.work(args)


def _convert(args: argparse.Namespace, function: Any, **more: Any) -> int:
    from rl3d.io.convert import parse_size

    show = _show if sys.stderr.isatty() else None
    last: list[float] = [0, 0]

    def note(done: int, total: int, seconds: float) -> None:
        last[:] = done, seconds
        if show:
            show(done, total, seconds)

    settings = {key: getattr(args, key) for key in ("dtype", "jobs", "dry_run", "resume", "overwrite")}
    size = parse_size(args.max_shard_size)
    made = function(args.source, args.target, max_shard_size=size, show=note, **settings, **more)
    if show:
        print(file=sys.stderr)
    if args.dry_run:
        print(json.dumps(made, indent=2))
        return 0
    print(f"{args.target}: {made['family']}, {made['dtype']}, {made['bytes']:,} bytes, fingerprint {made['fingerprint']} "
          f"({last[0] / 1e9 / max(last[1], 1e-9):.2f} GB/s)")  # fmt: skip
    return 0


def _show(done: int, total: int, seconds: float) -> None:
    share = min(1.0, done / max(1, total))
    bar = "#" * round(30 * share)
    print(f"\r[{bar:<30}] {share:4.0%} {done / 1e9 / max(seconds, 1e-9):.2f} GB/s", end="", file=sys.stderr, flush=True)


def _import(args: argparse.Namespace) -> int:
    from rl3d.io.convert import hf_to_megatron

    return _convert(args, hf_to_megatron, **_layout(args))


def _reshard(args: argparse.Namespace) -> int:
    from rl3d.io.convert import reshard

    return _convert(args, reshard, hf=args.hf, **_layout(args))


def _layout(args: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in ("tp", "pp", "ep", "vocab_multiple")}


def _export(args: argparse.Namespace) -> int:
    from rl3d.io.convert import megatron_to_hf

    return _convert(args, megatron_to_hf, hf=args.hf)


def _open(path: str, args: argparse.Namespace) -> Any:
    from rl3d.io.source import DTYPES, Source

    return Source(path, args.hf, DTYPES[args.dtype] if args.dtype else None)


def _inspect(args: argparse.Namespace) -> int:
    from rl3d.io.describe import describe
    from rl3d.io.source import DTYPES

    found = describe(args.first, args.hf, DTYPES[args.dtype] if args.dtype else None, args.fingerprints)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['path']}: {found['format']}, {found['family'] or 'as stored'}, {found['layout']}")
    for p in found["parameters"]:
        more = p.get("fingerprint") or (f"{p['pieces']} pieces" if "pieces" in p else "")
        print(f"{p['name']:<64} {'x'.join(map(str, p['shape'])):>16} {p['dtype']:<9} {p['bytes']:>14,} {more}".rstrip())
    total = f"{len(found['parameters'])} parameters, {found['bytes']:,} bytes"
    files = f"{len(found['files'])} files, {sum(found['files'].values()):,} bytes"
    print(f"{total} in {files}" + (f", fingerprint {found['fingerprint']}" if found["fingerprint"] else ""))
    if "note" in found:
        print(f"as stored, since {found['note']}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from rl3d.io.compare import Tolerance, changes, differences

    if args.second is None and (args.logits is not None or args.rtol is not None or args.atol is not None):
        raise UsageError("--logits, --rtol and --atol compare two checkpoints; name B")
    if args.logits is not None and args.rtol is not None:
        raise UsageError("--logits compares log-probabilities by --atol alone; leave --rtol out")
    first = _open(args.first, args)
    if args.second is None:
        found = changes(first)
    elif args.logits is not None:
        return _verify_logits(args, first, _open(args.second, args))
    else:
        given = args.rtol is not None or args.atol is not None
        tolerance = Tolerance(args.rtol or 0.0, args.atol or 0.0) if given else None
        found = differences(first, _open(args.second, args), tolerance)
    for line in found:
        print(f"differs: {line}", file=sys.stderr)
    if not found:
        how = f"{first.dtype}" if args.rtol is None and args.atol is None else "within the tolerance"
        print(f"the same: {len(first.parameters)} parameters, {how}")
    return DIFFERENT if found else 0


def _verify_logits(args: argparse.Namespace, first: Any, second: Any) -> int:
    from rl3d.engine.logits import logits_gaps, read_texts

    allowed = 1e-4 if args.atol is None else args.atol
    texts, code = read_texts(args.logits), 0
    for number, (text, gap) in enumerate(zip(texts, logits_gaps(first, second, texts), strict=True)):
        apart = not gap.worst <= allowed  # NaN is apart
        code = DIFFERENT if apart else code
        print(f"{'differs' if apart else 'the same'}: text {number} ({text[:32]!r}, {gap.tokens} tokens): log-probabilities "
              f"within {gap.worst:.2e} (at position {gap.position}), {gap.greedy} greedy tokens differ",
              file=sys.stderr if apart else sys.stdout)  # fmt: skip
    return code


def _families(args: argparse.Namespace) -> int:
    from rl3d.models import trained_families

    for name, why_not in sorted(trained_families().items(), key=lambda item: (item[1] != "", item[0])):
        print(f"{name:<12} {'converted only: ' + why_not if why_not else 'converted and trained'}")
    return 0
