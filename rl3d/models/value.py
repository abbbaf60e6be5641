"""Value models: a decoder whose last stage gives one number for each token in place of logits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl3d.models.architecture import Architecture
from rl3d.models.errors import UnsupportedModelError

# transformers' classes whose ``score`` is a value head, and whether it has a bias unless the configuration says so
_CLASSIFIERS = {"ForSequenceClassification": False, "ForTokenClassification": True}


def value_architecture(directory: str | Path) -> tuple[Architecture, bool]:
    """(architecture with a value head, whether the directory holds that head's weights).

    A language model's directory gives its backbone only; one of a sequence or token classifier gives the head, too.

    Raises:
        FileNotFoundError: no ``config.json``.
        UnsupportedModelError: a classifier with more than one label, or an unsupported model.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; expected a Hugging Face model directory with a config.json")
    config = json.loads(file.read_text())
    name = (config.get("architectures") or [""])[0]
    kind = next((k for k in _CLASSIFIERS if name.endswith(k)), None)
    bias = bool(config.pop("token_classification_bias", True)) if kind and _CLASSIFIERS[kind] else False
    if kind is not None and (labels := _num_labels(config)) != 1:
        raise UnsupportedModelError(
            f"{directory}: {name} with num_labels = {labels}; a critic or reward model has one value for each token, "
            f"expected num_labels = 1"
        )
    for field in ("num_labels", "classifier_dropout"):  # dropout is off here, as everywhere
        config.pop(field, None)
    return Architecture.from_hf(config).as_value_model(bias), kind is not None


def _num_labels(config: Mapping[str, Any]) -> int:
    """As transformers counts them: two unless the configuration says otherwise."""
    named = config.get("id2label")
    return len(named) if named else int(config.get("num_labels") or 2)


def classifier_config(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """``config.json`` of a value model as transformers' sequence classifier (with a bias: token classifier)."""
    from transformers.models.auto import modeling_auto as auto

    names = (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES if arch.value_bias
             else auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)  # fmt: skip
    one_label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tie_word_embeddings": False}
    kept = {k: v for k, v in config.items() if k not in ("num_labels", "token_classification_bias")}
    return {**kept, "architectures": [names[config["model_type"]]], **one_label}
