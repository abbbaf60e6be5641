"""``rl3d generate``: responses of a model to the prompts of a file."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rl3d.cli.arguments import command, positive


def add(commands: Any) -> None:
    sub = command(
        commands, "generate", run, "Sample a model's responses to the prompts of a file.",
        "Writes a JSON line as each response ends: index and sample, text, tokens, log-probabilities, finish reason.",
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub id, a run (runs/NAME) or a checkpoint")
    sub.add_argument("--prompts", metavar="FILE", type=Path, required=True,
                     help="text, one prompt a line; or .jsonl: prompt, messages or prompt_ids in each object, and of its "
                     "own id, max_new_tokens, stop, stop_token_ids, temperature, top_p, top_k, min_p, n, seed")  # fmt: skip
    sub.add_argument("--out", metavar="FILE", type=Path, help="where to; default standard output")
    sub.add_argument("--max-new-tokens", metavar="N", type=positive, default=256, help="longest response (256)")
    sub.add_argument("--temperature", metavar="T", type=float, default=1.0, help="0 is greedy (1)")
    sub.add_argument("--top-p", metavar="P", type=float, default=1.0, help="nucleus sampling; 1 is off (1)")
    sub.add_argument("--top-k", metavar="K", type=int, default=0, help="the k likeliest tokens; 0 is off (0)")
    sub.add_argument("--min-p", metavar="P", type=float, default=0.0,
                     help="tokens at least P times as likely as the likeliest; 0 is off (0)")  # fmt: skip
    sub.add_argument("--stop", metavar="TEXT", action="append", default=[], help="a text that ends a response; repeatable")
    sub.add_argument("--stop-token-id", metavar="ID", type=int, action="append", default=[],
                     help="a token that ends a response, beside the model's own; repeatable")  # fmt: skip
    sub.add_argument("--n", metavar="N", type=positive, default=1, help="responses to each prompt (1)")
    sub.add_argument("--seed", metavar="SEED", type=int, default=0, help="of the sampling noise (0)")
    sub.add_argument("--tp", metavar="N", type=positive, default=1, help="ranks that share the model (1)")
    sub.add_argument("--engine", choices=("megatron", "hf", "vllm"), default="megatron",
                     help="megatron: built in; hf: transformers' own generate, one rank; vllm (megatron)")  # fmt: skip
    sub.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (auto)")
    sub.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto",
                     help="auto: bfloat16 on CUDA, float32 on a CPU")  # fmt: skip
    sub.add_argument("--max-sequences", metavar="N", type=positive, default=64, help="sequences sampled at once (64)")
    sub.add_argument("--chat-template", choices=("auto", "none"), default="auto",
                     help="auto: the tokenizer's, when it has one; none: the text as it is")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from rl3d.config import ConfigError
    from rl3d.distributed.environment import is_launched
    from rl3d.generation.engine import SamplingParams
    from rl3d.trainer.generate import GenerateJob, main, read_prompts

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed")
    sampling = {name: getattr(args, name) for name in names}
    sampling |= {"stop": tuple(args.stop), "stop_token_ids": tuple(args.stop_token_id)}
    SamplingParams(**sampling)  # refuses what cannot be
    if args.engine == "hf" and args.tp > 1:
        raise ConfigError(f"--engine hf with --tp {args.tp}: transformers runs the whole model on one rank; leave --tp out")
    if not is_launched():
        read_prompts(args.prompts)  # mistakes in the file show before anything is started
        if args.tp > 1:
            from rl3d.distributed.launcher import launch_local

            return launch_local(["-m", "rl3d", *sys.argv[1:]], args.tp)
    main(GenerateJob(
        args.model, args.prompts, args.out, args.tp, args.engine, args.device, args.dtype, args.max_sequences,
        args.chat_template, sampling,
    ))  # fmt: skip
    return 0
