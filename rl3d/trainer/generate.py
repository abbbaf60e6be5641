"""What ``rl3d generate`` runs on each rank: prompts from a file, responses into a file as they end."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rl3d.config import ConfigError

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
_WHOLE, _NUMBER = (int, "a whole number"), (float, "a number")
OWN_KEYS: dict[str, tuple[type, str]] = {
    "id": (str, "a string"), "stop": (list, "a list of strings"), "stop_token_ids": (list, "a list of whole numbers"),
    **dict.fromkeys(("max_new_tokens", "top_k", "n", "seed"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
}  # fmt: skip
"""What a line of a ``.jsonl`` file may say for itself, in the place of the command line."""


@dataclass(frozen=True)
class PromptLine:
    """A prompt (text, chat messages or token ids), and what its line says of its sampling and its name."""

    prompt: Any
    request_id: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateJob:
    """Arguments of :func:`main`; ``sampling`` are fields of :class:`rl3d.generation.SamplingParams`."""

    model: str
    prompts: Path
    out: Path | None
    tp: int = 1
    engine: str = "megatron"
    device: str = "auto"
    dtype: str = "auto"
    max_sequences: int = 64
    chat_template: str = "auto"
    sampling: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[PromptLine]:
    """Prompts of a file.

    A ``.jsonl`` file has an object a line with one of ``prompt`` (text), ``messages`` (chat) and ``prompt_ids`` (tokens),
    and any of :data:`OWN_KEYS`; other keys are left alone. Any other file has one prompt a line, empty lines left out.

    Raises:
        ConfigError: no file, no prompts, or a line that is not as above; the message names the line.
    """
    if not path.is_file():
        raise ConfigError(f"--prompts {path}: no such file; expected text, one prompt a line, or .jsonl")
    lines = [(i, line) for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    plain = path.suffix != ".jsonl"
    prompts = [PromptLine(line) if plain else _record(f"--prompts {path}, line {i}", line) for i, line in lines]
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompts in it")
    return prompts


def _record(where: str, line: str) -> PromptLine:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    found = [key for key in PROMPT_KEYS if isinstance(record, dict) and record.get(key) is not None]
    if len(found) != 1:
        raise ConfigError(f"{where}: expected an object with one of {', '.join(PROMPT_KEYS)}")
    value = record[found[0]]
    if not isinstance(value, str if found[0] == "prompt" else list) or (
        found[0] == "prompt_ids" and not all(type(token) is int for token in value)
    ):
        kinds = {"prompt": "a string", "messages": "a list of messages", "prompt_ids": "a list of whole numbers"}
        raise ConfigError(f"{where}: {found[0]} is {type(value).__name__}, expected {kinds[found[0]]}")
    own: dict[str, Any] = {key: record[key] for key in OWN_KEYS if record.get(key) is not None}
    for key, given in own.items():
        kind, expected = OWN_KEYS[key]
        inside = {"stop": str, "stop_token_ids": int}.get(key)
        good = not isinstance(given, bool) and isinstance(given, (int, float) if kind is float else kind)
        if good and inside is not None:
            good = all(type(item) is inside for item in record[key])
        if not good:
            raise ConfigError(f"{where}: {key} is {given!r}, expected {expected}")
        own[key] = tuple(record[key]) if inside else given
    return PromptLine(value, own.pop("id", ""), own)


def main(job: GenerateJob) -> None:
    """Sample every prompt. Collective over ``job.tp`` ranks; rank 0 writes a JSON line as each sequence ends.

    A line has ``index`` (of the prompt), its ``id`` where it has one, and ``sample``, ``text``, ``tokens``,
    ``finish_reason``, ``logprobs`` (at the sampling temperature, before filters), ``sampled_logprobs`` (after them) and
    ``plain_logprobs`` (temperature 1).

    Raises:
        ConfigError: ranks that are not ``tp`` many, prompts that need a tokenizer where there is none.
        GenerationError: a prompt that cannot be served, by its number.
    """
    from rl3d.distributed import bootstrap
    from rl3d.distributed.groups import GroupRegistry, generation_groups
    from rl3d.generation.engine import Request, Result, SamplingParams
    from rl3d.generation.load import load_engine
    from rl3d.trainer.console import Console

    prompts = read_prompts(job.prompts)
    runtime = bootstrap.init(device=job.device)
    if runtime.world_size != job.tp:
        raise ConfigError(f"--tp {job.tp} on {runtime.world_size} ranks: start one rank for each part of the model")
    source = _open(job.model, runtime)
    encoded = list(_encode([line.prompt for line in prompts], job, source.tokenizer))
    given = {**job.sampling, "stop_token_ids": (*source.stop_token_ids, *job.sampling.get("stop_token_ids", ()))}
    requests = [
        Request(ids, SamplingParams(**_own(given, line.sampling)), (0, i, 0), line.request_id)
        for i, (ids, line) in enumerate(zip(encoded, prompts, strict=True))
    ]
    total = sum(request.params.n for request in requests)
    longest = max(request.params.max_new_tokens for request in requests)
    groups = generation_groups([tuple(range(job.tp))], GroupRegistry.of(runtime, "model"))
    assert groups is not None
    engine = load_engine(
        job.engine, source.directory, groups, device=runtime.device, dtype=_dtype(job.dtype, runtime.device),
        max_sequences=job.max_sequences, max_sequence_length=_window(source.directory, encoded, longest),
    )  # fmt: skip
    engine.tokenizer = source.tokenizer
    leads = runtime.rank == 0
    # progress goes where it does not mix with results
    console = Console(leads, sys.stderr if job.out is None else sys.stdout)
    file = _output(job.out) if leads else None
    with console.progress("Sampling", total) as advance:

        def finished(result: Result) -> None:
            if file is not None:
                print(json.dumps(_line(result, prompts, source.tokenizer), ensure_ascii=False), file=file, flush=True)
            advance(1)

        engine.generate(requests, on_finish=finished)
    if file is not None and job.out is not None:
        file.close()
        console.line(f"{total} responses -> {job.out}")
    runtime.shutdown()


def _open(model: str, runtime: Any) -> Any:
    """The weights and tokenizer: a Hugging Face directory or hub id, or the newest checkpoint of a run."""
    from rl3d.engine.source import open_model
    from rl3d.trainer import checkpoint

    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        try:
            found = checkpoint.find(path, str(path))
        except checkpoint.ResumeError:
            raise ConfigError(f"{model}: neither a model directory (config.json) nor a run or checkpoint") from None
        assert found is not None
        model = str(found / checkpoint.WEIGHTS)
    try:
        return open_model(model, None, runtime)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None


def _encode(prompts: list[Any], job: GenerateJob, tokenizer: Any) -> Iterator[list[int]]:
    from rl3d.data.dataset import PromptEncoder

    encoder = None if tokenizer is None else PromptEncoder(tokenizer, chat_template=job.chat_template)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
            yield prompt
        elif encoder is None:
            raise ConfigError(f"{job.model} has no tokenizer and prompt {number} is text; give prompt_ids in a .jsonl file")
        else:
            yield encoder.encode(prompt, f"prompt {number}")


def _window(directory: Path, prompts: list[list[int]], max_new_tokens: int) -> int:
    """Longest sequence to plan for; a longer prompt is refused by its number."""
    from rl3d.models import Architecture

    return min(max(map(len, prompts)) + max_new_tokens, Architecture.from_hf(directory).max_positions)


def _dtype(name: str, device: Any) -> Any:
    import torch

    automatic = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, automatic if name == "auto" else name)


def _output(out: Path | None) -> TextIO:
    if out is None:
        return sys.stdout
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.open("w", encoding="utf-8")


def _own(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The command line's sampling with a line's own in its place; the model's stop tokens stay."""
    ids = dict.fromkeys((*given["stop_token_ids"], *own.get("stop_token_ids", ())))
    return {**given, **own, "stop_token_ids": tuple(ids)}


def _line(result: Any, prompts: list[PromptLine], tokenizer: Any) -> dict[str, Any]:
    name = prompts[result.request_index].request_id
    text = None if tokenizer is None else tokenizer.decode(result.token_ids, skip_special_tokens=True)
    return {
        "index": result.request_index, **({"id": name} if name else {}),
        "sample": result.sample_index, "text": text, "tokens": result.token_ids,
        "finish_reason": result.finish_reason, "logprobs": result.logprobs, "sampled_logprobs": result.sampled_logprobs,
        "plain_logprobs": result.plain_logprobs,
    }  # fmt: skip
