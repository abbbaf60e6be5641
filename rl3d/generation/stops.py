"""Texts that end a response: looked for in what the tokens decode to, since a text may lie across tokens."""

from collections.abc import Sequence
from typing import Any

_MORE = 4  # tokens beyond the text's own: a character may be spread over as many


class StopTexts:
    """Looks for texts at the end of a growing response.

    A token stands for one byte of text or more, so a text of n bytes lies in the newest n tokens; special tokens between
    them, which a reader does not see, are allowed for up to as many. A text may be a special token's own.

    Args:
        texts: not empty; a response ends with the token that completes one of them, which stays part of it.
        tokenizer: anything with transformers' ``decode``.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self._window = 2 * max(len(text.encode()) for text in texts) + _MORE

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the texts is in the newest tokens, with special tokens written out or left out."""
        newest = list(token_ids[-self._window :])
        for skip in (True, False):
            tail = self.tokenizer.decode(newest, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if any(text in tail for text in self.texts):
                return True
        return False
