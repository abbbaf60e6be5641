"""Rows become prompts in tokens, and prompts come in batches at a position that can be saved."""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rl3d.data.batch import Prompt
from rl3d.data.sources import DataError, Row, rows_from

logger = logging.getLogger(__name__)


class PromptEncoder:
    """Prompts to token ids, with a cache: a prompt seen again is neither rendered nor tokenised again.

    With ``chat_template="auto"`` and a tokenizer that has a chat template, text becomes a user message and the template
    renders the conversation up to the point where the assistant speaks. The rendered text holds its special tokens
    already and is encoded without adding any. Otherwise text is encoded as it is, with the special tokens that the
    tokenizer adds. Either way the result starts with at most one BOS and does not end with an EOS that was not there.

    ``hits`` and ``misses`` count.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        chat_template: Literal["auto", "none"] = "auto",
        capacity: int = 100_000,
    ):
        if chat_template not in ("auto", "none"):
            raise ValueError(f"chat_template={chat_template!r}; expected 'auto' or 'none'")
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.uses_template = chat_template == "auto" and getattr(tokenizer, "chat_template", None) is not None
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, prompt: str | list[dict[str, Any]], where: str = "prompt") -> list[int]:
        """Token ids. Raises :class:`DataError` when there are none, or for messages without a template to render."""
        key = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self.hits += 1
                self._cache.move_to_end(key)
                return list(cached)
        ids = self._encode(prompt, where)
        with self._lock:
            self.misses += 1
            self._cache[key] = ids
            while len(self._cache) > self.capacity:
                self._cache.popitem(last=False)
        return list(ids)

    def _encode(self, prompt: str | list[dict[str, Any]], where: str) -> list[int]:
        tokenizer = self.tokenizer
        if self.uses_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if self.system_prompt is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": self.system_prompt}, *messages]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        elif isinstance(prompt, str):
            text = prompt if self.system_prompt is None else f"{self.system_prompt}\n\n{prompt}"
            ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
            eos = tokenizer.eos_token_id
            if ids and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
                ids = ids[:-1]  # an EOS appended by the tokenizer would end the response before it begins
        else:
            raise DataError(
                f"{where}: the prompt is a list of messages, but "
                + ("data.chat_template is none" if tokenizer.chat_template else "the tokenizer has no chat template")
                + "; give text, or a tokenizer with a template and data.chat_template=auto"
            )
        bos = tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if not ids or ids == [bos]:
            raise DataError(f"{where}: the prompt {prompt!r} has no tokens; remove the row or give it text")
        return ids


class PromptDataset:
    """Prompts by index, tokenised on demand.

    Args:
        rows: from :func:`rl3d.data.sources.load_rows`, or mappings with ``prompt`` and optional ``answer``,
            ``data_source`` and other columns, or texts.
        tokenizer: a Hugging Face tokenizer.
        system_prompt, chat_template: see :class:`PromptEncoder`.
        max_prompt_tokens: longest prompt; looking for longer ones tokenises everything once, into the cache.
        drop_too_long: leave longer prompts out, counted in ``dropped``; otherwise the first of them is an error.

    Raises :class:`DataError` for empty prompts, too long ones, or when nothing is left.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        chat_template: Literal["auto", "none"] = "auto",
        max_prompt_tokens: int | None = None,
        drop_too_long: bool = True,
        cache_size: int = 100_000,
    ):
        self.rows: list[Row] = rows_from(rows)
        self.encoder = PromptEncoder(
            tokenizer, system_prompt=system_prompt, chat_template=chat_template, capacity=cache_size
        )
        self.dropped = 0
        if max_prompt_tokens is not None:
            self._drop_long(max_prompt_tokens, drop_too_long)
        if not self.rows:
            raise DataError("no prompts: the data has no rows")

    def _drop_long(self, limit: int, drop: bool) -> None:
        kept, longest = [], 0
        for row in self.rows:
            length = len(self.encoder.encode(row.prompt, row.where))
            longest = max(longest, length)
            if length <= limit:
                kept.append(row)
            elif not drop:
                raise DataError(
                    f"{row.where}: the prompt has {length} tokens, data.max_prompt_tokens is {limit}; raise the limit "
                    "or set data.drop_too_long=true"
                )
        self.dropped = len(self.rows) - len(kept)
        if self.dropped and not kept:
            raise DataError(
                f"all {self.dropped} prompts are longer than data.max_prompt_tokens={limit} (longest {longest}); raise it"
            )
        if self.dropped:
            text = "dropped %d of %d prompts longer than data.max_prompt_tokens=%d (longest %d)"
            logger.warning(text, self.dropped, len(self.rows), limit, longest)
        self.rows = kept

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self.rows[index]
        is_text = isinstance(row.prompt, str)
        return Prompt(
            uid=str(index),
            index=index,
            text=row.prompt if isinstance(row.prompt, str) else None,
            messages=None if is_text else row.prompt,  # type: ignore[arg-type]
            token_ids=self.encoder.encode(row.prompt, row.where),
            answer=row.answer,
            data_source=row.data_source,
            extra=row.extra,
        )

    def fingerprint(self) -> str:
        """A digest of all prompts in order, by which a resumed run knows that the data is the same."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.prompt, row.data_source], sort_keys=True).encode() + b"\n")
        return digest.hexdigest()[:32]


class PromptStream:
    """Batches of prompts without end, epoch after epoch, in an order that ``seed`` and the epoch decide.

    The position counts prompts, so a run resumes at the exact prompt even with another batch size. Every batch is full:
    one that an epoch's end cuts short goes on with the first prompts of the next epoch. A prompt's uid is
    ``"{epoch}.{index}"``, so the same prompt from two epochs in one batch stays two prompts.

    ``epoch`` and ``offset`` are those of the next prompt. Raises ``ValueError`` for a batch larger than the data.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, *, shuffle: bool = True, seed: int = 0):
        if not 1 <= batch_size <= len(dataset):
            raise ValueError(
                f"batch_size={batch_size} must be between 1 and the number of prompts, {len(dataset)}; lower "
                "algorithm.batch_size or give more data"
            )
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.epoch = 0
        self.offset = 0
        self._order_of: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every prompt of an epoch has come up, the last one reaching into the next epoch."""
        return -(-len(self.dataset) // self.batch_size)

    def next_batch(self) -> list[Prompt]:
        """The next ``batch_size`` prompts."""
        batch = []
        for _ in range(self.batch_size):
            index = int(self._order()[self.offset])
            batch.append(replace(self.dataset[index], uid=f"{self.epoch}.{index}"))
            self.offset += 1
            if self.offset == len(self.dataset):
                self.epoch, self.offset = self.epoch + 1, 0
        return batch

    def __iter__(self) -> Iterator[list[Prompt]]:
        while True:
            yield self.next_batch()

    def _order(self) -> np.ndarray:
        if self._order_of[0] != self.epoch:
            self._order_of = (self.epoch, epoch_order(len(self.dataset), self.seed, self.epoch, self.shuffle))
        return self._order_of[1]

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.dataset),
            "fingerprint": self.dataset.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any], *, restart_on_new_data: bool = False) -> None:
        """Go to a saved position.

        Other data, or another order, would skip prompts that were never seen: that is a ``ValueError`` unless
        ``restart_on_new_data``, which then begins at the start of it.
        """
        mine = self.state_dict()
        names = ("rows", "fingerprint", "seed", "shuffle")
        differences = [f"{name} {state[name]} -> {mine[name]}" for name in names if state[name] != mine[name]]
        if differences and not restart_on_new_data:
            raise ValueError(
                f"the data is not what the saved position belongs to ({', '.join(differences)}); give the same data and "
                "seed, or start a new run"
            )
        self.epoch, self.offset = (0, 0) if differences else (int(state["epoch"]), int(state["offset"]))


def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Order of the rows in an epoch, int64 [rows]: sorted by a hash (splitmix64) of seed, epoch and row.

    Independent of any library's random stream, so a run resumes the same under another version of it.
    """
    index = np.arange(rows, dtype=np.uint64)
    if not shuffle:
        return index.astype(np.int64)
    start = np.array([(seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % 2**64], dtype=np.uint64)
    return np.argsort(_splitmix64(_splitmix64(start) ^ _splitmix64(index)), kind="stable").astype(np.int64)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood 2014; arithmetic is modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
