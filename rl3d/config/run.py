"""The whole configuration, and how it is read from YAML and the command line."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from rl3d.config import shipped
from rl3d.config.algorithm import PPOConfig
from rl3d.config.base import KNOWN_KEYS, ConfigError, Problem, Section, unknown_key
from rl3d.config.sections import (
    DataConfig,
    LayoutConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)

DEEPSPEED_OWNED = {
    "train_batch_size": "algorithm.batch_size",
    "train_micro_batch_size_per_gpu": "algorithm.micro_batch_tokens",
    "gradient_accumulation_steps": "algorithm.micro_batch_tokens",
    "gradient_clipping": "algorithm.max_grad_norm",
    "optimizer": "algorithm.lr, betas, eps, weight_decay",
    "scheduler": "algorithm.lr_schedule",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "data_types": "model.dtype",
    "tensor_parallel": "layout.train",
    "pipeline": "layout.train",
    "tensorboard": "trainer.loggers",
    "wandb": "trainer.loggers",
    "zero_optimization.stage": "layout.train, for example tp2.pp2.zero1",
    **{f"zero_optimization.{key}": "layout.offload" for key in ("offload_optimizer", "offload_param", "cpu_offload")},
    "managed_gradient_accumulation": "algorithm.micro_batch_tokens",
}
_FROM_MODEL = "the config.json of model.path (or model.random.config)"
MEGATRON_OWNED = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"), "layout.train"),
    **dict.fromkeys(
        (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
            *("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "overlap_p2p_comm"),
            *("batch_p2p_comm", "variable_seq_lengths"),
        ),
        "layout.train, for example tp2.pp2.vpp2.zero1",
    ),
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "vocab_size", "layernorm_epsilon", "normalization", "gated_linear_unit"),
            *("activation_func", "add_bias_linear", "add_qkv_bias", "rotary_base"),
        ),
        _FROM_MODEL,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype"), "model.dtype"),
    "seq_length": "model.max_sequence_length",
    "micro_batch_size": "algorithm.micro_batch_tokens",
    "global_batch_size": "algorithm.batch_size",
    "clip_grad": "algorithm.max_grad_norm",
    "lr": "algorithm.lr",
    "deterministic_mode": "trainer.deterministic",
    "calculate_per_token_loss": "algorithm.loss_aggregation",
    "sequence_parallel": "layout.sequence_parallel",
    **{f"recompute_{key}": "layout.recompute" for key in ("granularity", "method", "num_layers", "modules")},
}
_NOT_YET = {
    "deepspeed": (),
    "megatron": ("context_parallel_size", "expert_model_parallel_size", "num_moe_experts", "mtp_num_layers"),
}
"""Settings of the libraries that this release would compute wrongly, or not at all."""


def passthrough_problems(section: str, values: dict[str, Any]) -> list[Problem]:
    """What cannot be passed on to ``section`` (deepspeed or megatron): keys that rl3d owns, and what it cannot do yet."""
    owned = DEEPSPEED_OWNED if section == "deepspeed" else MEGATRON_OWNED
    problems = []
    for key, value in _leaves(values):

        def inside(name: str, key: str = key) -> bool:
            return key == name or key.startswith(name + ".")

        ours = next((ours for name, ours in owned.items() if inside(name)), None)
        if ours is not None:
            problems.append(Problem(f"{section}.{key}", f"rl3d sets this itself; remove it and use {ours}", value))
        elif any(inside(name) for name in _NOT_YET[section]):
            problems.append(Problem(f"{section}.{key}", "this release cannot train with it; remove it", value))
    return problems


class RunConfig(Section):
    """Everything a run needs. Read it from a file with :func:`load_config`."""

    model: ModelConfig = Field(description="Which model is trained.")
    layout: LayoutConfig = Field(default_factory=lambda: LayoutConfig(), description="Where the weights live.")
    data: DataConfig = Field(description="Where prompts come from.")
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(), description="How responses are sampled.")
    reward: RewardConfig = Field(description="How responses are scored.")
    algorithm: PPOConfig = Field(default_factory=lambda: PPOConfig(), description="How the policy learns.")
    trainer: TrainerConfig = Field(
        default_factory=lambda: TrainerConfig(),
        description="How long, where to, what is kept.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="Passed on to DeepSpeed; keys that have a name of ours are refused."
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed on to megatron-core's TransformerConfig; keys that have a name of ours are refused.",
    )

    @field_validator("deepspeed", "megatron", mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        problems = passthrough_problems("deepspeed", self.deepspeed) + passthrough_problems("megatron", self.megatron)
        if self.algorithm.name == "grpo" and self.rollout.n < 2:
            problems.append(Problem("rollout.n", "grpo compares the samples of one prompt; use 2 or more", self.rollout.n))
        needed = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if self.model.max_sequence_length is not None and self.model.max_sequence_length < needed:
            problems.append(
                Problem(
                    "model.max_sequence_length",
                    f"shorter than data.max_prompt_tokens + rollout.max_new_tokens = {needed}; raise it to {needed} "
                    "or lower one of those",
                    self.model.max_sequence_length,
                )
            )
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def run_dir(self) -> Path:
        """Directory that this run writes: trainer.output_dir / trainer.name."""
        return self.trainer.run_dir

    def to_yaml(self) -> str:
        """The configuration as YAML; :func:`load_config` reads it back to an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as ``RandomModel | None`` or ``list[DataSource]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := section_of(arg))), None)


def _names(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in cls.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _names(inner, f"{prefix}{name}.")


KNOWN_KEYS[:] = list(_names(RunConfig))


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-6 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: the key {key_node.value!r} is given twice; keep one of them")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(text: str, what: str) -> Any:
    try:
        return _text_keys(yaml.load(text, _Loader))  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from None
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def _text_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _text_keys(value) for key, value in tree.items()}
    return [_text_keys(item) for item in tree] if isinstance(tree, list) else tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{override!r}: expected key=value, for example algorithm.lr=1e-6")
    parts = key.split(".")
    if parts[0] not in RunConfig.model_fields:
        raise ConfigError(Problem(key, unknown_key(parts[0], RunConfig.model_fields), text))
    node = tree
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        if not isinstance(node[part], dict):
            above = ".".join(parts[: depth + 1])
            problem = f"{above} holds {node[part]!r}, not a mapping; set {above} as a whole"
            raise ConfigError(Problem(key, problem, text))
        node = node[part]
    node[parts[-1]] = _read_yaml(text, f"{key}={text}")
    if parts[0] == "layout" and len(parts) == 2:
        # What a person types wins over what the file says for machines with GPUs.
        choices = tree["layout"].get("on_gpus")
        for choice in choices.values() if isinstance(choices, dict) else ():
            if isinstance(choice, dict):
                choice.pop(parts[1], None)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, then apply ``key=value`` overrides (dotted keys, values as YAML).

    ``quickstart`` or ``configs/quickstart.yaml``, where there is no such file, is the one that comes with rl3d.
    ``trainer.name`` defaults to the file's name. Paths inside are relative to the working directory.
    Raises :class:`~rl3d.config.base.ConfigError` with one line per problem.
    """
    given, path = Path(path), Path(path)
    if not given.is_file():
        path = shipped.find_config(given) or given
    if not path.is_file():
        nearby = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = f"; there are {', '.join(nearby[:8])}" if nearby else "; the path is relative to the working directory"
        raise ConfigError(f"{path}: no such configuration file{hint}; rl3d brings {', '.join(shipped.config_names())}")
    tree = _read_yaml(path.read_text(encoding="utf-8"), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections ({', '.join(RunConfig.model_fields)}), found {tree!r}")
    for override in overrides:
        _apply(tree, override)
    if tree.get("trainer") is None:
        tree["trainer"] = {}
    if isinstance(tree["trainer"], dict):
        tree["trainer"].setdefault("name", re.sub(r"[^\w.+-]+", "-", path.stem))
    for name in ("layout", "rollout", "algorithm"):
        if name in tree and tree[name] is None:  # a section whose keys are all commented out
            del tree[name]
    try:
        return RunConfig(**tree)
    except ConfigError as error:
        raise ConfigError(error.problems, source=f"{path} cannot run:") from None
