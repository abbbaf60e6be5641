"""Stop texts in what tokens decode to."""

from typing import Any

from rl3d.generation.stops import StopTexts


class Tokenizer:
    """Bytes as tokens, and one special token, 256."""

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        out = b"".join(bytes([i]) if i < 256 else b"" if skip_special_tokens else b"<end>" for i in ids)
        return out.decode(errors="replace")


def first(texts: tuple[str, ...], ids: list[int]) -> int | None:
    """Number of tokens after which a response ends."""
    stops = StopTexts(texts, Tokenizer())
    return next((n for n in range(1, len(ids) + 1) if stops.found(ids[:n])), None)


def test_a_text_is_found_with_the_token_that_completes_it() -> None:
    ids = list(b"eins, zwei, drei\n\nQ: vier")
    assert first(("\n\nQ:",), ids) == len("eins, zwei, drei\n\nQ:")
    assert first(("drei", "zwei"), ids) == len("eins, zwei")
    assert first(("fünf",), ids) is None
    assert first(("ü",), list("fünf".encode())) == 3  # two bytes


def test_special_tokens_may_lie_between_and_may_be_the_text() -> None:
    ids = [*b"ab", 256, *b"cd", 256]
    assert first(("bc",), ids) == 4 and first(("<end>",), ids) == 3 and first(("d<end>",), ids) == 6
