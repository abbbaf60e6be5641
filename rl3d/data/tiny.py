"""A task and a model small enough to learn from nothing on a laptop: configs/tiny_learns.yaml.

``tiny:copy`` shows a letter and wants it said back: the prompt ``c :`` asks for ``c c c c c c c c``. The reward
(:func:`rl3d.rewards.tiny.score`) is the share of right letters among eight, so a random model starts near 0.03, half
right answers are worth half, and only a model that reads its prompt comes close to 1.
"""

import io
import json
import os
import random
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl3d.data.hf_files import share_weights
from rl3d.data.sources import DataError, Row
from rl3d.utils.quiet import quiet_transformers

_SYMBOLS = string.ascii_lowercase + string.digits + ":"
_UNK, _BOS, _EOS, _PAD = range(4)


def tiny_rows(task: str, *, size: int, seed: int = 0, letters: str = "abcd") -> list[Row]:
    """Rows of a tiny task. ``letters`` are those that may be asked for. Raises :class:`DataError` on an unknown task."""
    if task != "copy":
        raise DataError(f"tiny:{task}: no such task; there is tiny:copy")
    if not letters or any(letter not in string.ascii_lowercase for letter in letters):
        raise DataError(f"tiny:copy: letters {letters!r} must be lower-case letters, such as 'abcd'")
    choice = random.Random(f"tiny:copy {seed}")
    asked = [choice.choice(letters) for _ in range(size)]
    return [Row(f"{letter} :", letter, "tiny:copy", {}, f"tiny:copy[{i}]") for i, letter in enumerate(asked)]


def train_tokenizer(directory: str | Path, seed: int = 0) -> Any:
    """Train a SentencePiece model (BPE, 79 pieces) on letters and digits and save it as a Hugging Face tokenizer.

    Pieces: unk, bos, eos, pad, and each symbol with and without a space before it. Every run with one seed gives the
    same file. Returns the tokenizer.
    """
    import sentencepiece
    from tokenizers import Tokenizer
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    source = random.Random(f"tokenizer {seed}")
    sentences = [" ".join(source.choice(_SYMBOLS) for _ in range(16)) for _ in range(1000)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=5 + 2 * len(_SYMBOLS),
        byte_fallback=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=_UNK,
        bos_id=_BOS,
        eos_id=_EOS,
        pad_id=_PAD,
        num_threads=1,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    tokens: dict[str, Any] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    with quiet_transformers():
        converted = LlamaTokenizer.from_pretrained(str(directory), local_files_only=True, add_bos_token=True, **tokens)
        # LlamaTokenizer counts on byte pieces for unknown characters and, without them, drops such characters silently.
        backend = json.loads(converted.backend_tokenizer.to_str())
        backend["model"].update(unk_token="<unk>", byte_fallback=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), **tokens)
        tokenizer.save_pretrained(str(directory))
    return tokenizer


def make_tiny_model(directory: str | Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """A Hugging Face directory with random weights and the tokenizer of :func:`train_tokenizer`.

    ``config`` is a config.json as a mapping (``model_type``, ``hidden_size``, ...); ``vocab_size`` may be left out and
    is then the tokenizer's, token ids always are. Weights are drawn in float32 as transformers initialises the model
    (``initializer_range``), from ``seed`` and without touching the global random state. The directory appears complete
    or not at all. Returns it. Raises ``ValueError`` for a vocabulary smaller than the tokenizer's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        place = Path(scratch) / "model"
        tokenizer = train_tokenizer(place, seed=0)
        settings = dict(config)
        model_type = settings.pop("model_type", "llama")
        settings.setdefault("vocab_size", len(tokenizer))
        _require_room(tokenizer, settings)
        ids = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
        hf_config = AutoConfig.for_model(model_type, **{**settings, **ids})
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
            model.generation_config = GenerationConfig(**ids)
            model.save_pretrained(str(place))
        share_weights(place)
        os.replace(place, directory)
    return directory


def make_drawn_model(directory: str | Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """The same for a model of any size: its weights are not made here but drawn where they are read, shard by shard
    (:mod:`rl3d.io.random_reader`). ``config`` is complete, vocab_size included. Raises ``ValueError`` as above.
    """
    from rl3d.io.random_reader import write_random_model

    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        place = Path(scratch) / "model"
        _require_room(train_tokenizer(place, seed=0), config)
        ids = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
        write_random_model(place, {**config, **ids}, seed, std=config.get("initializer_range", 0.02))
        (place / "generation_config.json").write_text(json.dumps(ids))
        os.replace(place, directory)
    return directory


def _require_room(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` when the model has fewer embeddings than the tokenizer has tokens."""
    if config.get("vocab_size", 0) < len(tokenizer):
        raise ValueError(
            f"model.random.config.vocab_size={config.get('vocab_size')} is smaller than the tokenizer's {len(tokenizer)}; "
            f"leave it out"
        )
