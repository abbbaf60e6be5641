"""Arguments that several commands share."""

import argparse
from collections.abc import Callable
from typing import Any


class UsageError(ValueError):
    """Something asked of a command that it cannot do here; the message says what would do."""


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> Any:
    """The parser of one command; ``text`` is its line in ``rl3d --help``, ``more`` follows in its own help."""
    sub = commands.add_parser(name, help=text, description=f"{text} {more}".strip())
    sub.set_defaults(command=name, run=run)
    return sub


def config_file(sub: Any) -> None:
    """CONFIG and key=value ..., as every command takes them that reads a configuration file."""
    sub.add_argument("config", metavar="CONFIG", help="YAML file, or the name of one that comes with rl3d: quickstart")
    sub.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key, for example algorithm.lr=1e-6 trainer.steps=10"
    )


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def model(sub: Any) -> None:
    """MODEL, as every command takes it that plans from sizes alone."""
    text = "Hugging Face directory, config.json, hub id, or a shipped shape such as llama2-7b (configs/models/)"
    sub.add_argument("model", metavar="MODEL", help=text)


def links(sub: Any) -> None:
    """--topology and --gpus-per-node."""
    text = "file (YAML or JSON) or preset: h100-8 (what is assumed), h200-8, a100-8, a100-40g-8, pcie-8"
    sub.add_argument("--topology", metavar="FILE", default="h100-8", help=text)
    sub.add_argument("--gpus-per-node", metavar="N", type=positive, help="other than the topology's")


def workload(sub: Any) -> None:
    """What a step does and what the GPUs hold, for every command that predicts steps."""
    sub.add_argument("--gpu-mem", metavar="GB", type=gigabytes, help="of one GPU; the topology's when left out")
    sub.add_argument("--prompt-len", metavar="N", type=positive, default=512, help="tokens (512)")
    sub.add_argument("--response-len", metavar="N", type=positive, default=1024, help="tokens (1024)")
    sub.add_argument("--sequences", metavar="N", type=positive, default=512, help="samples of a step, all GPUs (512)")
    sub.add_argument("--samples", metavar="N", type=positive, default=1, help="of them with one prompt, computed once (1)")
    sub.add_argument("--micro-batch", metavar="N", type=positive, default=4, help="sequences of one rank at once (4)")
    sub.add_argument("--optimizer-steps", metavar="N", type=positive, default=1, help="mini-batches in a step (1)")
    sub.add_argument("--critic", action="store_true", help="train a critic of the same size (PPO)")
    sub.add_argument("--no-reference", action="store_true", help="no reference model (kl_coef 0)")
    sub.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="activations (none)")
    sub.add_argument("--sequence-parallel", action="store_true", help="cut norms and residuals over TP ranks")
    sub.add_argument("--offload", choices=("none", "optimizer", "params"), default="none", help="to host memory (none)")
    sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")


def gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected gigabytes (10^9 bytes), for example 80")
    return value
