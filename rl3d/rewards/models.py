"""A reward that a model computes: a sequence classifier of transformers, or any module that scores token ids.

Each replica's leading rank scores the samples of its replica with the whole model: on a GPU between sampling and updating,
in batches of similar lengths; on a CPU while sampling goes on, one sample at a time, so that a score never depends on what
else was waiting.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl3d.data.batch import Prompt, Sample
from rl3d.data.tokenizers import load_tokenizer
from rl3d.rewards.functions import RewardError
from rl3d.utils.quiet import quiet_transformers


class ModelReward:
    """Scores prompt and response with a model.

    The text is rendered by the model's own tokenizer: its chat template if it has one, otherwise prompt and response end to
    end; with one BOS if the tokenizer begins texts with one. Without a tokenizer the policy's token ids are taken. A sample
    longer than the model's positions is an error of that sample, it is not cut.

    Args:
        model: directory of an ``AutoModelForSequenceClassification`` with one label, such a model, or a module with
            ``forward(input_ids, attention_mask)`` ([B, S] each, right-padded) giving scores [B] or [B, 1].
        tokenizer: for a model object; a directory brings its own.
        device: where it runs. Other than a CPU, it is called at the phase boundary.
        dtype: of the weights of a directory; None as they are saved.
        residency: ``"device"``, or ``"host"``: in (pinned) host memory except while it scores.
        system_prompt: put before conversations that have no system message.
        max_batch_tokens: padded tokens in a batch.
    """

    batch_size = 1
    workers = 1
    timeout_s = float("inf")

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        residency: str = "device",
        system_prompt: str | None = None,
        trust_remote_code: bool = False,
        max_batch_tokens: int = 16384,
    ):
        self.name = name or (str(model) if isinstance(model, str | Path) else type(model).__name__)
        self.device, self.dtype, self.residency = torch.device(device), dtype, residency
        self.tokenizer, self.system_prompt, self.max_batch_tokens = tokenizer, system_prompt, max_batch_tokens
        self._given, self._remote_code = model, trust_remote_code
        self._module: nn.Module | None = None
        self._host: list[Tensor] | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether it scores between sampling and updating, and not in a thread beside sampling."""
        return self.device.type != "cpu"

    def load(self) -> "ModelReward":
        """Read the weights now; otherwise the first use does.

        Raises:
            RewardError: no sequence classifier with one label, or one without a trained head.
        """
        if self._module is None:
            given = self._given
            module = given if isinstance(given, nn.Module) else self._read(Path(given))
            labels = getattr(getattr(module, "config", None), "num_labels", 1)
            if labels != 1:
                raise RewardError(f"reward {self.name}: {labels} labels; expected a sequence classifier with num_labels = 1")
            module = module.requires_grad_(False).eval()
            if self.residency == "host":
                tensors = [*module.parameters(), *module.buffers()]
                self._host = [t.detach().to("cpu") for t in tensors]
                if self.device.type == "cuda":
                    self._host = [t.pin_memory() for t in self._host]
                self._set(module, self._host)
            else:
                module = module.to(self.device)
            self._module = module
        return self

    def _read(self, directory: Path) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        with quiet_transformers():
            module, report = AutoModelForSequenceClassification.from_pretrained(
                str(directory), dtype=self.dtype or "auto", local_files_only=True, output_loading_info=True,
                trust_remote_code=self._remote_code,
            )  # fmt: skip
        if report["missing_keys"]:
            raise RewardError(
                f"reward {self.name}: {', '.join(sorted(report['missing_keys']))} not among its weights, so scores would "
                f"be random; expected a trained AutoModelForSequenceClassification"
            )
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(directory, trust_remote_code=self._remote_code)
        return module

    @contextmanager
    def _resident(self) -> Iterator[nn.Module]:
        module = self.load()._module
        assert module is not None
        if self._host is None:
            yield module
            return
        self._set(module, [t.to(self.device, non_blocking=True) for t in self._host])
        try:
            yield module
        finally:
            self._set(module, self._host)  # the device's copy is free once nothing refers to it

    @staticmethod
    def _set(module: nn.Module, values: Sequence[Tensor]) -> None:
        for tensor, value in zip([*module.parameters(), *module.buffers()], values, strict=True):
            tensor.data = value

    # ---- text to tokens

    def encode(self, sample: Sample, prompt: Prompt) -> list[int]:
        """The token ids that the model sees."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return [*sample.prompt_ids, *sample.response_ids]
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        plain = tokenizer("x", verbose=False)["input_ids"]  # shows what the tokenizer adds by itself
        if getattr(tokenizer, "chat_template", None) is not None:
            said = prompt.messages or [{"role": "user", "content": prompt.text or ""}]
            if self.system_prompt is not None and said[0]["role"] != "system":
                said = [{"role": "system", "content": self.system_prompt}, *said]
            text = tokenizer.apply_chat_template([*said, {"role": "assistant", "content": sample.text}], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if bos is not None and plain[0] == bos and ids[:1] != [bos]:
                ids = [bos, *ids]
        else:
            parts = [m["content"] for m in prompt.messages] if prompt.messages else [prompt.text or ""]
            parts = [self.system_prompt, *parts] if self.system_prompt is not None else parts
            ids = tokenizer("\n\n".join(parts) + sample.text, verbose=False)["input_ids"]
            ends_itself = plain[-1] in tokenizer.all_special_ids  # [SEP], or an EOS of its own
            if sample.finish_reason == "stop" and eos is not None and not ends_itself:
                ids = [*ids, eos]
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    # ---- tokens to scores

    def scores(self, pairs: Sequence[tuple[Sample, Prompt]]) -> list[float | Exception]:
        """A score for each sample, or the reason why there is none."""
        self.load()
        found: list[float | Exception | None] = [None] * len(pairs)
        tokens: dict[int, list[int]] = {}
        for index, (sample, prompt) in enumerate(pairs):
            try:
                tokens[index] = self._checked(self.encode(sample, prompt))
            except Exception as error:  # of this text only
                found[index] = error
        order = sorted(tokens, key=lambda i: (len(tokens[i]), pairs[i][0].uid))
        with self._resident() as module, torch.inference_mode():
            for batch in self._batches(order, tokens):
                try:
                    values = self._forward(module, [tokens[i] for i in batch]).tolist()
                except Exception as error:
                    values = [error] * len(batch)
                for index, value in zip(batch, values, strict=True):
                    finite = isinstance(value, Exception) or math.isfinite(value)
                    found[index] = value if finite else RewardError(f"reward {self.name} gave {value}")
        return [RewardError("not scored") if value is None else value for value in found]

    def _checked(self, ids: list[int]) -> list[int]:
        module: Any = self._module
        config: Any = getattr(module, "config", None)
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = getattr(inner, "max_position_embeddings", None)
        if not ids or (isinstance(limit, int) and limit > 0 and len(ids) > limit):
            raise RewardError(f"reward {self.name}: {len(ids)} tokens; the model reads 1 to {limit}")
        table = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
        rows = getattr(table, "num_embeddings", None)
        if rows is not None and max(ids) >= rows:
            raise RewardError(
                f"reward {self.name}: token {max(ids)}, but its vocabulary has {rows}; is it another tokenizer's?"
            )
        return ids

    def _batches(self, order: Sequence[int], tokens: dict[int, list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:  # lengths rise, so the last one decides how much is padding
            if batch and len(tokens[index]) * (len(batch) + 1) > self.max_batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _forward(self, module: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Scores [B] of sequences, right-padded to the longest."""
        lengths = torch.tensor([len(s) for s in sequences])
        ids_BS = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
        for row, sequence in zip(ids_BS, sequences):
            row[: len(sequence)] = torch.tensor(sequence)
        mask_BS = (torch.arange(ids_BS.shape[1]) < lengths[:, None]).to(torch.int64)
        ids_BS, mask_BS = ids_BS.to(self.device), mask_BS.to(self.device)
        # transformers' decoders look for the last token that is not the padding token's id, which is the wrong one where
        # padding is EOS or 0 is a word; what their head says of every position is caught here and read by the mask.
        head, caught = getattr(module, "score", None), []
        hook = head.register_forward_hook(lambda _, __, out: caught.append(out)) if isinstance(head, nn.Module) else None
        config = getattr(module, "config", None)
        if hook is not None and config is not None and getattr(config, "pad_token_id", 0) is None:
            config.pad_token_id = 0  # without one they refuse batches
        try:
            output = module(input_ids=ids_BS, attention_mask=mask_BS)
        finally:
            if hook is not None:
                hook.remove()
        if caught and caught[0].dim() == 3:
            values = caught[0][torch.arange(len(sequences)), lengths - 1]
        else:
            values = output if isinstance(output, Tensor) else output.logits
        if values.shape not in ((len(sequences),), (len(sequences), 1)):
            raise RewardError(
                f"reward {self.name} gave a tensor of shape {tuple(values.shape)} for {len(sequences)} sequences; expected "
                f"({len(sequences)},) or ({len(sequences)}, 1)"
            )
        return values.reshape(-1).float().cpu()
