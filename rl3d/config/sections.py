"""The sections of a run's configuration beside the algorithm: model, layout, data, rollout, reward, trainer."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rl3d.config.base import ConfigError, Problem, Section
from rl3d.config.rewards import RewardFunction
from rl3d.layout.parallel import GenLayout, TrainLayout, check_order

PositiveInt = Annotated[int, Field(ge=1)]
VERIFY_LEVELS = ("off", "sampled", "full")
"""How much of the weights is compared after each switch."""


class RandomModel(Section):
    """A model with random weights, made on the spot."""

    config: dict[str, Any] | str = Field(
        description="A Hugging Face config.json as a mapping (model_type, hidden_size, ...), where vocab_size may be left "
        "out and is then the tokenizer's; or the path of such a file, for example configs/models/qwen2.5-1.5b.json: its "
        "weights are drawn shard by shard and never written down."
    )
    seed: int = Field(default=0, description="Seed of the initial weights.")


class ModelConfig(Section):
    """Which model is trained."""

    path: str | None = Field(
        default=None,
        description="Hugging Face model directory; a hub id, org/name or org/name@revision, fetched once on each node "
        "(from the cache alone where HF_HUB_OFFLINE=1); or a name that `rl3d prepare` knows (smollm2-135m-instruct), "
        "looked for under models/.",
    )
    random: RandomModel | None = Field(
        default=None,
        description="Random weights instead of path: {config: {...}, seed}.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer directory or hub id; null: that of model.path, or the one that a tiny: data source trains.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Weights and activations; auto: bfloat16 on CUDA, float32 on a CPU."
    )
    max_sequence_length: PositiveInt | None = Field(
        default=None,
        description="Longest prompt + response in tokens; null: data.max_prompt_tokens + rollout.max_new_tokens.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Let the tokenizer run Python code from the model directory, and fetch such code with a hub id.",
    )
    attention: Literal["auto", "sdpa"] = Field(
        default="auto",
        description="Core attention kernel; auto: the best installed.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.random is None):
            raise ConfigError(
                Problem("path", "give either model.path (a directory or name) or model.random, and not both", self.path)
            )
        return self


class LayoutChoice(Section):
    """What `layout.on_gpus` changes when at least that many GPUs are there."""

    train: str | None = Field(default=None, description="layout.train on that many GPUs.")
    gen: str | None = Field(default=None, description="layout.gen on that many GPUs.")
    order: str | None = Field(default=None, description="layout.order on that many GPUs.")
    ranks: PositiveInt | Literal["auto"] | None = Field(default=None, description="layout.ranks on that many GPUs.")

    @model_validator(mode="after")
    def _readable(self) -> "LayoutChoice":
        _check_layout_texts(self.train, self.gen, self.order)
        return self


class LayoutConfig(Section):
    """Where the weights live: the training layout, the generation layout, the number of ranks."""

    train: str = Field(
        default="tp1.pp1.zero1",
        description="Training layout, for example tp2.pp2.zero1, or tp2.pp2.vpp2.zero1 with two interleaved chunks of "
        "layers on each stage; dp follows from the number of ranks. Stages may differ by a layer.",
    )
    gen: str = Field(default="tp1", description="Generation layout, for example tp4; the other ranks become replicas.")
    order: str = Field(
        default="auto",
        description="Axes of the training mesh, fastest varying first, for example tp-pp-dp, or dp:2-tp-pp-dp with one "
        "axis split; auto: what moves the least.",
    )
    ranks: PositiveInt | Literal["auto"] = Field(
        default="auto", description="Number of ranks; auto: one per GPU, on a CPU the fewest that both layouts allow."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA when there is a GPU.")
    staging_mib: PositiveInt = Field(default=48, description="Largest staging buffer of a switch, MiB a direction.")
    transport: Literal["p2p", "auto", "peer"] = Field(
        default="auto",
        description="How weights travel at a switch. auto: ranks of a host read each other's memory (CUDA IPC, on a CPU "
        "shared memory), each pair that can; messages of NCCL or gloo carry the rest. peer: it is an error when a pair of "
        "a host cannot. p2p: messages only.",
    )
    training_copy: Literal["keep", "drop"] = Field(
        default="keep",
        description="drop: give the training weights' memory back during generation and rebuild them afterwards.",
    )
    gradients: Literal["keep", "drop"] = Field(
        default="keep",
        description="drop: give the gradient buffers' memory back during generation.",
    )
    optimizer_state: Literal["keep", "host"] = Field(
        default="keep",
        description="host: fp32 weights and Adam moments wait in host memory during generation. (layout.offload keeps "
        "them there always.)",
    )
    alias: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: a generation weight that is a contiguous piece of the rank's training weights is read where it "
        "lies, without memory or copies of its own; off: all generation weights have memory of their own.",
    )
    defer_gather: bool = Field(
        default=False,
        description="With zero1 and zero2: leave out the all-gather after the last optimiser step of an update. Generation "
        "takes each rank's own partition; on the way back the weights come from the nearest holder.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tp: outside attention and MLP, each tensor-parallel rank holds a part of the sequence; less "
        "activation memory, the same numbers.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations computed again in the backward pass: those of core attention, or of each whole layer.",
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        default="none",
        description="optimizer: fp32 weights and Adam moments live in host memory and the step runs there (zero1 to 3); "
        "params: the weights rest there as well (zero3).",
    )
    memory_limit_gb: float | None = Field(
        default=None,
        gt=0,
        description="Use no more than this of each GPU, in GB (10^9 bytes), as if it had no more; null: all that is free.",
    )
    verify: Literal["off", "sampled", "full"] = Field(
        default="off",
        description="Compare weight fingerprints after each switch: full: of every parameter; sampled: of every 16th, "
        "others each time. Weights that are NaN or infinite are never handed to generation, whatever is set here.",
    )
    on_gpus: dict[PositiveInt, LayoutChoice] = Field(
        default_factory=dict,
        description="Other values of train, gen, order, ranks for machines with GPUs: the largest number not above "
        "the number of GPUs is taken. A key given on the command line wins over it.",
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        # YAML 1.1 reads the bare words off and on as booleans.
        return {False: "off", True: "full"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _readable(self) -> "LayoutConfig":
        _check_layout_texts(self.train, self.gen, self.order)
        return self

    @property
    def train_layout(self) -> TrainLayout:
        """The training layout, parsed."""
        return TrainLayout.parse(self.train)

    @property
    def gen_layout(self) -> GenLayout:
        """The generation layout, parsed."""
        return GenLayout.parse(self.gen)

    @property
    def axis_order(self) -> tuple[str, ...] | None:
        """Mesh order, fastest varying axis first; None when it is ours to choose."""
        if self.order == "auto":
            return None
        return tuple(self.order.split("-"))


def _check_layout_texts(train: str | None, gen: str | None, order: str | None) -> None:
    problems = []
    for key, text, parse in (("train", train, TrainLayout.parse), ("gen", gen, GenLayout.parse)):
        try:
            if text is not None:
                parse(text)
        except ValueError as error:
            problems.append(Problem(key, str(error), text))
    if order not in (None, "auto"):
        try:
            check_order(str(order).split("-"))
        except ValueError as error:
            problems.append(Problem("order", f"{error}, or auto", order))
    if problems:
        raise ConfigError(problems)


class DataSource(Section):
    """One source of prompts in a mixture."""

    source: str = Field(description="JSONL file, reasoning_gym:TASK, or tiny:TASK.")
    weight: float = Field(default=1.0, gt=0, description="Share of the mixture, relative to the other sources.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the task, passed on as they are.")

    @field_validator("source")
    @classmethod
    def _form(cls, value: str) -> str:
        kind, colon, task = value.partition(":")
        if colon and "/" not in kind and "\\" not in kind and (kind not in ("reasoning_gym", "tiny") or not task):
            raise ValueError("expected a JSONL path, reasoning_gym:TASK or tiny:TASK")
        return value

    @property
    def kind(self) -> Literal["jsonl", "reasoning_gym", "tiny"]:
        """What the source is."""
        prefix = self.source.partition(":")[0]
        if ":" in self.source and prefix == "reasoning_gym":
            return "reasoning_gym"
        return "tiny" if ":" in self.source and prefix == "tiny" else "jsonl"

    @property
    def task(self) -> str:
        """The task's name; for a JSONL source its path."""
        return self.source if self.kind == "jsonl" else self.source.partition(":")[2]


class DataConfig(Section):
    """Where prompts come from."""

    train: list[DataSource] = Field(
        min_length=1,
        description="JSONL path (columns prompt, optional answer and data_source; others reach the reward by name), "
        "reasoning_gym:TASK, tiny:TASK, {source, weight, options}, or a list of these.",
    )
    size: PositiveInt | None = Field(
        default=None,
        description="Rows to use; null: all of a file, 1000 of a generated task.",
    )
    seed: int | None = Field(default=None, description="Seed of generated tasks and of the order; null: trainer.seed.")
    system_prompt: str | None = Field(default=None, description="System message put before every prompt.")
    prompt_key: str = Field(default="prompt", description="Column that holds the prompt: text or a list of messages.")
    max_prompt_tokens: PositiveInt = Field(default=512, description="Longest prompt in tokens.")
    drop_too_long: bool = Field(
        default=True,
        description="Leave longer prompts out and count them; false: they are an error.",
    )
    shuffle: bool = Field(default=True, description="New order of the rows in every epoch, by seed.")
    chat_template: Literal["auto", "none"] = Field(
        default="auto", description="auto: the tokenizer's chat template when it has one; none: the text as it is."
    )

    @field_validator("train", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        return [{"source": item} if isinstance(item, str) else item for item in items]


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["megatron", "hf", "vllm"] = Field(
        default="megatron",
        description="Generation engine. megatron: the built-in one, on weights in place. hf: transformers' model.generate() "
        "on a whole copy of the model on each rank (layout.gen tp1). vllm: vLLM in the same processes, layout.gen its "
        "tensor parallelism. Into the last two, weights are streamed tensor by tensor at each switch.",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed on to vllm.LLM, for example {gpu_memory_utilization: 0.4} (0.5 if left out, of each GPU, for "
        "weights and cache, which sleep during training; not on a CPU); keys that have a name of ours are "
        "refused.",
    )
    n: PositiveInt = Field(default=8, description="Samples for each prompt.")
    max_new_tokens: PositiveInt = Field(default=256, description="Longest response in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Softmax temperature; log-probabilities are taken at it.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1 turns it off.")
    top_k: int = Field(default=0, ge=0, description="Sample among the k likeliest tokens; 0 turns it off.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Sample among tokens at least this times as likely as the likeliest; 0: off."
    )
    stop: list[str] = Field(default_factory=list, description="Texts that end a response, of any length.")
    stop_token_ids: list[int] = Field(
        default_factory=list, description="Token ids that end a response, beside the model's own."
    )
    max_sequences: PositiveInt = Field(default=64, description="Sequences decoded together on one replica.")
    max_batch_tokens: PositiveInt = Field(
        default=8192,
        description="Prompt tokens in one prefill batch on one replica; a longer prompt takes several.",
    )
    cache_strategy: Literal["adaptive", "full", "lightweight"] = Field(
        default="adaptive",
        description="Key/value cache. adaptive: what a batch needs, freed for training; full: the most there can be, kept; "
        "lightweight: a quarter of what a batch needs, freed after it, more recomputation. Captured decode steps of a GPU "
        "stay with all of them, and so does the memory that they compute in.",
    )
    seed: int | None = Field(default=None, description="Seed of the sampling noise; null: trainer.seed.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one(cls, value: Any) -> Any:
        return 0 if value == -1 else value  # other trainers write -1 for off


class RewardConfig(Section):
    """How responses are scored."""

    function: str | None = Field(default=None, description="Short for functions with one entry of weight 1.")
    functions: list[RewardFunction] = Field(
        default_factory=list,
        description="Rewards, {function, weight, kwargs}, {model, weight, ...} or {url, weight, ...} each; the score is the "
        "weighted sum.",
    )
    workers: PositiveInt = Field(default=4, description="Concurrent calls of functions on one replica.")
    timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds for one call of a function; a late sample is marked failed."
    )
    max_failure_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Failed samples are left out of the loss; a larger share of them ends the run.",
    )

    @model_validator(mode="after")
    def _some_function(self) -> "RewardConfig":
        if (self.function is None) == (not self.functions):
            raise ConfigError(
                Problem("function", "give either reward.function (module:name) or reward.functions, and not both")
            )
        if self.function is not None:
            RewardFunction(function=self.function)
        return self

    @property
    def terms(self) -> list[RewardFunction]:
        """All rewards, the short form included."""
        return [RewardFunction(function=self.function)] if self.function is not None else list(self.functions)


class TrainerConfig(Section):
    """The run itself: how long, where it writes, what it keeps."""

    name: str = Field(
        default="run",
        min_length=1,
        description="Name of the run; default: the configuration file's name.",
    )
    output_dir: str = Field(default="runs", description="Directory of runs; this run writes output_dir/name.")
    steps: PositiveInt | None = Field(default=None, description="Training steps; null: epochs decides.")
    epochs: PositiveInt | None = Field(
        default=None,
        description="Passes over the data; null: one, unless steps is given.",
    )
    save_every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: PositiveInt = Field(default=2, description="Newest checkpoints kept.")
    resume: str = Field(
        default="auto",
        description="auto: from the run's last checkpoint if any, in whatever layout it was written; never; or a directory.",
    )
    loggers: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = Field(
        default=["console", "jsonl", "tensorboard"], description="Where metrics go."
    )
    seed: int = Field(default=0, description="Seed of everything that has no seed of its own.")
    export_hf: bool = Field(default=True, description="Write the trained model to output_dir/name/hf at the end.")
    timeout_s: float = Field(default=600.0, gt=0, description="Seconds that a collective or a wait may take.")
    samples_per_step: int = Field(default=8, ge=0, description="Samples of each step written to the samples file.")
    memory_check: Literal["strict", "warn", "off"] = Field(
        default="strict",
        description="A run that does not fit its devices by arithmetic: strict refuses it before any weight is read, warn "
        "says so and starts, off does not ask. See `rl3d memory`.",
    )
    deterministic: bool = Field(default=False, description="Only deterministic kernels; slower on a GPU.")

    @field_validator("memory_check", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare off as false

    @model_validator(mode="after")
    def _consistent(self) -> "TrainerConfig":
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(Problem("epochs", f"steps = {self.steps} is given too; give one of them", self.epochs))
        if not re.fullmatch(r"[\w.+-]+", self.name) or self.name in (".", ".."):
            raise ConfigError(Problem("name", "expected letters, digits and . _ + - (it names a directory)", self.name))
        return self

    @property
    def run_dir(self) -> Path:
        """Directory of this run."""
        return Path(self.output_dir) / self.name
