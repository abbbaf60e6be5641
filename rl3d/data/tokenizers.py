"""Tokenizers from a model directory, and the token ids that end or pad a sequence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl3d.utils.quiet import quiet_transformers


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a directory, never from the network.

    A tokenizer without a padding token pads with its end-of-sequence token; nothing in rl3d tells the two apart by id.
    Raises ``FileNotFoundError`` when the directory holds no tokenizer.
    """
    directory = Path(directory).expanduser()
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
    if not any((directory / name).is_file() for name in names):
        raise FileNotFoundError(
            f"{directory}: no tokenizer there (looked for {', '.join(names)}); give a directory written by "
            "save_pretrained, or set model.tokenizer"
        )
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code, padding_side="left"
        )
    tokenizer.clean_up_tokenization_spaces = False  # it would take spaces out of the text that rewards see
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(directory: str | Path | None, tokenizer: Any = None) -> tuple[int, ...]:
    """All token ids that end a response, in a stable order without repeats.

    Taken from generation_config.json, config.json and the tokenizer, each of which may name one id or several: chat
    models often list their end-of-turn token in only one of these places.
    """
    found: list[int | None] = []
    for config in _configs(directory):
        value = config.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    found.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def pad_id(directory: str | Path | None, tokenizer: Any = None) -> int:
    """The token id that fills rectangular batches: the tokenizer's, else the model's, else a stop token, else 0."""
    candidates: list[int | None] = [getattr(tokenizer, "pad_token_id", None)]
    candidates += [config.get("pad_token_id") for config in _configs(directory)]
    candidates += [*stop_ids(directory, tokenizer), 0]
    # Some configurations say -1 for "none".
    return next(int(token) for token in candidates if token is not None and int(token) >= 0)


def _configs(directory: str | Path | None) -> Iterator[dict[str, Any]]:
    for name in ("generation_config.json", "config.json"):
        if directory is not None and (path := Path(directory) / name).is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            yield config
            if isinstance(config.get("text_config"), dict):
                yield config["text_config"]
