"""What a Hugging Face configuration says about the rotary embedding, in all the places where versions put it.

Nothing here is guessed: theta has no default, and a scaling or a field that the computation does not cover is an error.
"""

from collections.abc import Mapping
from typing import Any

from rl3d.models.errors import NotTrainedError, UnsupportedModelError

# rope_type -> (fields it must have, fields it may have): those that transformers' formulas read
_SCALINGS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor"},
        {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"},
    ),
}  # fmt: skip
_REFUSED = {
    "dynamic": "its frequencies depend on the length of the longest sequence in a batch, so a token's log-probability "
    "would change with its neighbours",
    "longrope": "it has two sets of frequencies and picks one by the length of the longest sequence in a batch, so a "
    "token's log-probability would change with its neighbours",
}
_ALIASES = {"su": "longrope"}


def rope_settings(config: Mapping[str, Any], family: str, max_positions: int) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Theta, and the scaling of the frequencies as sorted pairs (``rope_type`` among them; empty for plain RoPE).

    transformers 5 keeps both in ``rope_parameters``, for some models once for each kind of layer; older files have
    ``rope_theta`` at the top and ``rope_scaling`` beside it.

    Raises:
        UnsupportedModelError: no theta, contradictions, or a scaling that is unknown.
        NotTrainedError: a scaling that is known and not computed, or kinds of layers that differ.
    """
    found = _one_for_all_layers(config, family)
    partials = {found.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")}
    for partial in partials - {None, 1.0}:
        raise NotTrainedError(f"{family}: partial_rotary_factor = {partial} is not supported; expected 1.0")
    theta = found.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        raise UnsupportedModelError(
            "the configuration gives no rope_theta (neither in rope_parameters nor at the top); add it: guessing "
            "10000 is wrong for most models"
        )
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    kind = _ALIASES.get(kind, kind)
    if family == "phi3" and kind == "yarn":
        kind = "longrope"  # as transformers reads it
    given = {k: v for k, v in found.items() if k != "type" and v is not None}
    if kind in _REFUSED:
        raise NotTrainedError(f"{family}: RoPE scaling {kind!r} is not supported: {_REFUSED[kind]}")
    if kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"{family}: RoPE scaling {kind!r} is not supported; expected one of {', '.join(_SCALINGS)}"
        )
    if kind == "default":  # transformers reads nothing else then
        return float(theta), ()
    required, optional = _SCALINGS[kind]
    if not required <= set(given) <= required | optional:
        may = f", and may have {sorted(optional)}" if optional else ""
        raise UnsupportedModelError(
            f"{family}: RoPE scaling {kind!r} has the fields {sorted(given)}; expected {sorted(required)}{may}"
        )
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", max_positions)
    return float(theta), tuple(sorted({"rope_type": kind, **given}.items()))


def _one_for_all_layers(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields of ``rope_parameters`` (or ``rope_scaling``), equal for all layers."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and dict(new) != dict(old):
        raise UnsupportedModelError(
            f"{family}: rope_parameters = {dict(new)} and rope_scaling = {dict(old)} contradict each other; keep one"
        )
    found = dict(new or old)
    nested = {key: value for key, value in found.items() if isinstance(value, Mapping)}
    if not nested:
        return found
    flat = {key: value for key, value in found.items() if key not in nested}
    first, *rest = nested.values()
    if any(dict(other) != dict(first) for other in rest):
        shown = "; ".join(f"{key}: {dict(value)}" for key, value in sorted(nested.items()))
        raise NotTrainedError(
            f"{family}: rope_parameters differ between kinds of layers ({shown}); one rotary embedding serves all "
            f"layers here"
        )
    return {**flat, **first}
