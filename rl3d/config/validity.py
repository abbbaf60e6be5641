"""Impossible runs refused: layouts, batch sizes, files, the model's divisibility.

All of it happens before a process group, a model or torch itself exists.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl3d.config.base import ConfigError, Problem
from rl3d.config.engines import engine_problems
from rl3d.config.hub import HubError, HubId
from rl3d.config.run import RunConfig
from rl3d.config.shipped import folder
from rl3d.layout import LayoutError, TrainLayout, cut_problem, stage_layers, tp_sizes

MODELS_DIR = "models"
"""Where `rl3d prepare NAME` puts models, and where model.path looks for a bare name."""


def model_dir(cfg: RunConfig) -> Path | None:
    """Directory of model.path: itself, or the one of that name under models/; None for random weights and hub ids.

    Raises :class:`ConfigError` when there is no config.json.
    """
    if cfg.model.path is None or HubId.parse(cfg.model.path) is not None:
        return None
    given = Path(cfg.model.path).expanduser()
    candidates = [given] if len(given.parts) != 1 else [given, Path(MODELS_DIR) / given]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    if given.is_dir():
        text = "the directory has no config.json; give a Hugging Face model directory"
    elif len(given.parts) == 1:
        text = f"not found here or under {MODELS_DIR}/; run `rl3d prepare {cfg.model.path}` or give a model directory"
    else:
        text = "no such directory; give a Hugging Face model directory, a hub id (org/name), or a name for `rl3d prepare`"
    raise ConfigError(Problem("model.path", text, cfg.model.path))


def read_hf_config(cfg: RunConfig) -> dict[str, Any]:
    """The model's Hugging Face configuration; of a hub id, that one file is fetched if it is not in the cache.

    Raises :class:`ConfigError` when it is missing or unreadable.
    """
    if cfg.model.random is not None:
        return random_config(cfg.model.random.config)
    assert cfg.model.path is not None
    hub_id, directory = HubId.parse(cfg.model.path), model_dir(cfg)
    try:
        if hub_id is not None:
            path = hub_id.file("config.json")
        else:
            assert directory is not None
            path = directory / "config.json"
        return json.loads(path.read_text(encoding="utf-8"))
    except HubError as error:
        raise ConfigError(Problem("model.path", str(error), cfg.model.path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("model.path", f"config.json is not readable: {error}", cfg.model.path)) from None


def random_config(given: dict[str, Any] | str) -> dict[str, Any]:
    """The configuration of random weights: a mapping, or a file, of this directory or shipped with rl3d.

    Raises :class:`ConfigError` when there is no such file or it is not a mapping in JSON.
    """
    if not isinstance(given, str):
        return dict(given)
    path = Path(given).expanduser()
    if not path.is_file() and path.parts[:1] == ("configs",):
        path = folder("configs").joinpath(*path.parts[1:])
    key = "model.random.config"
    if not path.is_file():
        text = "no such file; expected a config.json, for example configs/models/qwen2.5-1.5b.json"
        raise ConfigError(Problem(key, text, given))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(key, f"not readable as JSON: {error}", given)) from None
    if not isinstance(found, dict):
        raise ConfigError(Problem(key, "expected a JSON object with model_type, hidden_size, ...", given))
    return found


def check(cfg: RunConfig) -> dict[str, Any]:
    """Refuse a resolved configuration that cannot run; return the model's Hugging Face configuration.

    Raises :class:`ConfigError` with every problem found: layouts, batch sizes, files, the model's divisibility.
    """
    problems = [*_layout_problems(cfg), *_file_problems(cfg)]
    hf_config: dict[str, Any] = {}
    try:
        hf_config = read_hf_config(cfg)
        check_model(cfg, hf_config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return hf_config


def _layout_problems(cfg: RunConfig) -> list[Problem]:
    problems = engine_problems(cfg)
    train = cfg.layout.train_layout
    if (text := zero_problem(train, cfg.layout.offload)) is not None:
        problems.append(Problem("layout.train", text, str(train)))
    if train.zero == 3 and cfg.layout.training_copy == "drop":
        text = "zero3 keeps no whole training weights that could be dropped; use training_copy=keep"
        problems.append(Problem("layout.training_copy", text, "drop"))
    if cfg.layout.transport == "peer":
        freed = {"training_copy": "drop", "offload": "params"}
        for key in (key for key, value in freed.items() if getattr(cfg.layout, key) == value):
            text = f"frees memory that layout.transport = peer lets other ranks read; use layout.transport=p2p, or {key}="
            other = "keep" if key == "training_copy" else "optimizer"
            problems.append(Problem(f"layout.{key}", text + other, freed[key]))
    if cfg.layout.defer_gather and train.zero not in (1, 2):
        text = f"leaves out a gather of zero1 and zero2, and layout.train = {train} has none; write zero1, or leave it out"
        problems.append(Problem("layout.defer_gather", text, True))
    if cfg.layout.sequence_parallel and train.tp == 1:
        text = f"splits the sequence over tensor-parallel ranks, and layout.train = {train} has one; write tp2 or more"
        problems.append(Problem("layout.sequence_parallel", text, True))
    responses = cfg.algorithm.mini_batch_size * cfg.rollout.n
    if train.dp is not None and responses % train.dp:
        problems.append(
            Problem(
                "algorithm.mini_batch_size",
                f"{cfg.algorithm.mini_batch_size} prompts x rollout.n = {cfg.rollout.n} are {responses} responses, "
                f"which do not divide by dp = {train.dp} of layout.train = {train}; make them a multiple of {train.dp}",
                cfg.algorithm.mini_batch_size,
            )
        )
    return problems


def zero_problem(train: TrainLayout, offload: str = "none") -> str | None:
    """Why this layout cannot be trained at its ZeRO stage with this ``layout.offload``; None when it can."""
    if offload != "none" and train.zero == 0:
        return f"zero0 partitions nothing that offload={offload} could move; write zero1, zero2 or zero3"
    if offload == "params" and train.zero != 3:
        return f"offload=params moves weights that are sharded; write zero3 for zero{train.zero}, or offload=optimizer"
    if train.zero == 3 and train.pp > 1:
        return (
            "zero3 shards the weights of each layer over dp and gathers them in step with all ranks, which pipeline stages "
            f"do not keep; write zero1 with pp={train.pp}, or pp1.zero3"
        )
    return None


def _file_problems(cfg: RunConfig) -> list[Problem]:
    problems = []
    tiny = False
    for index, source in enumerate(cfg.data.train):
        tiny |= source.kind == "tiny"
        key = f"data.train.{index}.source" if len(cfg.data.train) > 1 else "data.train"
        if source.kind == "jsonl" and not Path(source.source).expanduser().is_file():
            text = "no such file; expected a JSONL path, reasoning_gym:TASK or tiny:TASK"
            problems.append(Problem(key, text, source.source))
        if source.kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
            problems.append(Problem(key, "reasoning-gym is not installed; pip install reasoning-gym", source.source))
    for index, term in enumerate(cfg.reward.functions):
        if term.model is not None:
            problems += _reward_model_problems(f"reward.functions.{index}.model", term.model)
        if term.function is not None and not _importable(term.function):
            problems.append(
                Problem(
                    f"reward.functions.{index}.function",
                    "no such module or file; expected module:name or file.py:name, seen from the working directory",
                    term.function,
                )
            )
    models = {f"algorithm.{key}": getattr(cfg.algorithm, key) for key in ("critic_model", "reference_model")}
    for key, given in models.items():
        if given and HubId.parse(given) is None and not (Path(given).expanduser() / "config.json").is_file():
            text = "no config.json there; give a Hugging Face model directory or a hub id (org/name)"
            problems.append(Problem(key, text, given))
    if cfg.model.tokenizer is not None and not Path(cfg.model.tokenizer).expanduser().is_dir():
        text = "no such directory; give a tokenizer directory or a hub id (org/name)"
        hub_id = HubId.parse(cfg.model.tokenizer)
        try:
            if hub_id is not None:
                hub_id.file("tokenizer_config.json")
        except HubError as error:
            text, hub_id = str(error), None
        if hub_id is None:
            problems.append(Problem("model.tokenizer", text, cfg.model.tokenizer))
    if cfg.model.random is not None and cfg.model.tokenizer is None and not tiny:
        text = "random weights bring no tokenizer; give a directory, or use tiny:TASK data"
        problems.append(Problem("model.tokenizer", text, None))
    if cfg.trainer.resume not in ("auto", "never") and not Path(cfg.trainer.resume).expanduser().is_dir():
        text = "no such checkpoint directory; expected auto, never or a directory"
        problems.append(Problem("trainer.resume", text, cfg.trainer.resume))
    return problems


def _reward_model_problems(key: str, model: str) -> list[Problem]:
    hub_id, directory = HubId.parse(model), Path(model).expanduser()
    try:
        path = hub_id.file("config.json") if hub_id is not None else directory / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
    except HubError as error:
        return [Problem(key, str(error), model)]
    except (OSError, ValueError):
        return [Problem(key, "no readable config.json there; give a Hugging Face model directory or a hub id", model)]
    names = config.get("architectures") or []
    labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)  # transformers leaves out its default of two
    if names and not any("ForSequenceClassification" in name or "RewardModel" in name for name in names):
        return [Problem(key, f"a {names[0]}; expected a sequence classifier with one label", model)]
    if labels != 1:
        return [Problem(key, f"a classifier with {labels} labels; expected one with num_labels = 1", model)]
    return []


def _importable(function: str) -> bool:
    where = function.rpartition(":")[0] or function
    if where.endswith(".py"):
        return Path(where).expanduser().is_file()
    # Only the top-level package: looking deeper would import the parents, and with them maybe torch.
    top = where.split(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None or top in sys.modules


def check_model(cfg: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse layouts that cannot cut this model: heads and ffn by tp, fewer layers than stages, and too short a
    context.

    megatron-core cuts the fused QKV by raw rows, so a tp above the number of KV heads is possible where it is a
    multiple of it. Raises :class:`ConfigError` naming the key and the sizes that would do.
    """
    inner = hf_config.get("text_config") or hf_config
    names = ("num_attention_heads", "num_hidden_layers", "intermediate_size")
    heads, layers, ffn = sizes = [value if isinstance(value := inner.get(name), int) else 0 for name in names]
    kv_heads = inner.get("num_key_value_heads") or heads
    missing = [name for name, size in zip(names, sizes) if size < 1]
    where = "model.random.config" if cfg.model.path is None else "model.path"
    if missing:
        text = f"its configuration does not say {', '.join(missing)}; expected a decoder such as llama"
        raise ConfigError(Problem(where, text, cfg.model.path or hf_config.get("model_type")))
    options = tp_sizes(heads, kv_heads, ffn)
    problems = []
    train, gen = cfg.layout.train_layout, cfg.layout.gen_layout
    for key, text, tp in (("layout.train", str(train), train.tp), ("layout.gen", str(gen), gen.tp)):
        if reason := cut_problem(tp, heads, kv_heads, ffn):
            choices = " or ".join(str(n) for n in options[:8])
            problems.append(Problem(key, f"{reason}; choose tp {choices}", text))
    try:
        stage_layers(layers, train.pp, train.vpp)
    except LayoutError as error:
        problems.append(Problem("layout.train", str(error), str(train)))
    limit, wanted = inner.get("max_position_embeddings"), cfg.model.max_sequence_length
    if isinstance(limit, int) and wanted is not None and wanted > limit:
        problems.append(
            Problem(
                "model.max_sequence_length",
                f"longer than the model's max_position_embeddings = {limit}; lower data.max_prompt_tokens or "
                "rollout.max_new_tokens",
                wanted,
            )
        )
    if problems:
        raise ConfigError(problems)
