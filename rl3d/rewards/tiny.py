"""The rule that scores ``tiny:copy``."""


def score(response: str, answer: str, length: int = 8) -> float:
    """Share of right letters: how often ``answer`` occurs among the response's characters, spaces apart.

    At least ``length`` characters are asked for, so a short response cannot score 1 and a long one gains nothing from
    more characters of which some are wrong.
    """
    said = response.replace(" ", "")
    return said.count(answer) / max(length, len(said))
