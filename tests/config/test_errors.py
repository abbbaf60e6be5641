"""Every wrong configuration is refused with the key, the value, what was expected and a remedy."""

from pathlib import Path

import pytest

from rl3d.config import ConfigError, PPOConfig, check, load_config, passthrough_problems, resolve

TINY = """
model:
  random:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 4,
             num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 128}
layout: {train: tp2.pp2.zero1, gen: tp4, ranks: 4, device: cpu}
data: {train: "tiny:copy", max_prompt_tokens: 24}
rollout: {n: 4, max_new_tokens: 8}
reward: {function: "json:loads"}
algorithm: {batch_size: 8, kl_coef: 0}
trainer: {steps: 2}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TINY)
    return path


# (override(s), words that one line of the error holds)
CASES = [
    # unknown keys: the nearest name, or the section where it lives
    ("algorithm.clip_coeff=0.2", ["algorithm.clip_coeff = 0.2", "did you mean 'clip_coef'?"]),
    ("rollout.lr=1", ["rollout.lr = 1", "it exists as 'algorithm.lr'"]),
    ("trainr.steps=3", ["trainr.steps", "did you mean 'trainer'?"]),
    ("model.random.sed=3", ["model.random.sed = 3", "did you mean 'seed'?"]),
    ("data.train=[{source: x.jsonl, weigth: 2}]", ["data.train.0.weigth = 2", "did you mean 'weight'?"]),
    ("layout.on_gpus.2.trian=tp2", ["layout.on_gpus.2.trian", "did you mean 'train'?"]),
    ("model.zzz=1", ["model.zzz = 1", "expected one of path, random"]),
    # values of the wrong kind or out of range
    ("rollout.n=four", ["rollout.n = 'four'", "expected a whole number", "Samples for each prompt"]),
    ("rollout.n=2.5", ["rollout.n = 2.5", "expected a whole number"]),
    ("rollout.top_p=0", ["rollout.top_p = 0", "expected greater than 0"]),
    ("rollout.temperature=.nan", ["rollout.temperature = nan", "expected"]),
    ("algorithm.clip_coef=-1", ["algorithm.clip_coef = -1", "expected greater than 0"]),
    ("algorithm.lr=fast", ["algorithm.lr = 'fast'", "expected a number"]),
    ("algorithm.betas=[0.9, 1.0]", ["algorithm.betas.1 = 1.0", "less than 1"]),
    ("algorithm.kl_estimator=k4", ["algorithm.kl_estimator = 'k4'", "'k1', 'k2' or 'k3'"]),
    ("algorithm.name=dpo", ["algorithm.name = 'dpo'", "expected 'grpo' or 'ppo'"]),
    ("algorithm=fast", ["algorithm = 'fast'", "expected a mapping"]),
    ("trainer.export_hf=maybe", ["trainer.export_hf = 'maybe'", "expected true or false"]),
    ("trainer.loggers=[console, mlflow]", ["trainer.loggers.1 = 'mlflow'", "'wandb'"]),
    ("trainer.name=a/b", ["trainer.name = 'a/b'", "names a directory"]),
    ("layout.ranks=0", ["layout.ranks = 0", "at least 1 or 'auto'"]),
    ("layout.verify=some", ["layout.verify = 'some'", "'off', 'sampled' or 'full'"]),
    ("layout.order=tp-pp", ["layout.order = 'tp-pp'", "tp-pp-dp"]),
    ("model.dtype=float16", ["model.dtype = 'float16'", "'bfloat16'"]),
    ("reward.function=score", ["reward.function = 'score'", "module:name"]),
    ("reward={functions: [{}]}", ["reward.functions.0.function", "give one of function, model and url; there is none"]),
    ("reward={functions: [{model: a/b, url: 'http://h/'}]}", ["there is model and url"]),
    ("reward={functions: [{url: 'ftp://h/'}]}", ["reward.functions.0.url = 'ftp://h/'", "expected http://"]),
    ("reward={functions: [{function: 'json:loads', retries: 5}]}", ["functions.0.retries = 5", "a setting of url"]),
    ("reward={functions: [{url: 'http://h/', residency: host}]}", ["functions.0.residency = 'host'", "a setting of model"]),
    ("reward={functions: [{model: ./none}]}", ["functions.0.model = './none'", "no readable config.json"]),
    ("reward={functions: [{model: a/b}]}", ["functions.0.model = 'a/b'", "hf download a/b"]),
    ("data.train=hub:gsm8k", ["data.train.0.source = 'hub:gsm8k'", "reasoning_gym:TASK"]),
    ("data.train=[]", ["data.train = []", "at least 1"]),
    # keys that contradict one another
    ("algorithm.mini_batch_size=3", ["algorithm.mini_batch_size = 3", "batch_size = 8", "[1, 2, 4, 8]"]),
    ("rollout.n=1", ["rollout.n = 1", "use 2 or more"]),
    ("model.path=models/x", ["model.path = 'models/x'", "not both"]),
    ("model.random=null", ["model.path = None", "give either"]),
    ("reward.functions=[{function: json:loads}]", ["reward.function", "not both"]),
    ("trainer.epochs=2", ["trainer.epochs = 2", "steps = 2", "give one"]),
    ("algorithm.use_critic=true", ["algorithm.use_critic = True", "use_critic=false"]),
    ("model.max_sequence_length=16", ["model.max_sequence_length = 16", "raise it to 32"]),
    ("algorithm.critic_model=x", ["algorithm.critic_model = 'x'", "there is no critic", "name=ppo"]),
    (["algorithm.name=ppo", "algorithm.freeze_critic=true"], ["algorithm.freeze_critic = True", "critic_model"]),
    (
        ["algorithm.name=ppo", "algorithm.use_critic=false", "algorithm.critic_only_steps=2"],
        ["algorithm.critic_only_steps = 2", "use_critic=true"],
    ),
    (["algorithm.name=ppo", "algorithm.critic_model=./nowhere"], ["algorithm.critic_model", "no config.json"]),
    ("algorithm.reference_model=x", ["algorithm.reference_model = 'x'", "kl_coef = 0.0", "remove it"]),
    (["algorithm.kl_coef=0.1", "algorithm.reference=none"], ["algorithm.reference = 'none'", "kl_coef"]),
    # keys of the libraries that have a name of ours
    ("deepspeed.zero_optimization.stage=2", ["deepspeed.zero_optimization.stage = 2", "layout.train"]),
    ("deepspeed.zero_optimization.offload_optimizer.device=cpu", ["deepspeed.zero_optimization", "layout.offload"]),
    ("megatron.sequence_parallel=true", ["megatron.sequence_parallel = True", "layout.sequence_parallel"]),
    ("megatron.recompute_granularity=full", ["megatron.recompute_granularity = 'full'", "layout.recompute"]),
    ("deepspeed.train_batch_size=8", ["deepspeed.train_batch_size = 8", "algorithm.batch_size"]),
    ("deepspeed.gradient_clipping=1.0", ["deepspeed.gradient_clipping", "algorithm.max_grad_norm"]),
    ("deepspeed.fp16.enabled=true", ["deepspeed.fp16.enabled", "model.dtype"]),
    ("megatron.tensor_model_parallel_size=2", ["megatron.tensor_model_parallel_size = 2", "layout.train"]),
    ("megatron.num_layers=3", ["megatron.num_layers = 3", "config.json"]),
    ("megatron.num_layers_in_first_pipeline_stage=3", ["num_layers_in_first_pipeline_stage = 3", "layout.train"]),
    # layouts
    ("layout.train=tp2.pq2", ["layout.train = 'tp2.pq2'", "cannot read 'pq2'"]),
    ("layout.train=tp2.tp2", ["layout.train", "given twice"]),
    ("layout.gen=tp0", ["layout.gen = 'tp0'", "at least 1"]),
    ("layout.gen=tp3", ["layout.gen = 'tp3'", "4 ranks do not divide", "divisors of 4"]),
    ("layout.train=tp3.pp1", ["layout.train = 'tp3.pp1'", "4 ranks do not divide by tp x pp = 3"]),
    ("layout.train=tp1.pp1.dp3", ["layout.train", "needs tp x pp x dp = 3 ranks", "there are 4"]),
    ("layout.train=tp2.pp2.zero3", ["layout.train = 'tp2.pp2.dp1.zero3'", "zero1 with pp=2"]),
    (["layout.train=tp2.zero0", "layout.offload=optimizer"], ["layout.train", "offload=optimizer", "zero1"]),
    (["layout.train=tp2.zero2", "layout.offload=params"], ["layout.train", "zero3 for zero2"]),
    (["layout.train=pp4", "layout.sequence_parallel=true"], ["layout.sequence_parallel = True", "tp2 or more"]),
    (["layout.train=tp2.zero3", "layout.training_copy=drop"], ["layout.training_copy = 'drop'", "training_copy=keep"]),
    ("rollout.engine=hf", ["layout.gen = 'tp4'", "rollout.engine = hf", "write tp1"]),
    (["rollout.engine=vllm", "layout.training_copy=drop"], ["layout.training_copy = 'drop'", "rollout.engine = vllm"]),
    (["rollout.engine=vllm", "layout.verify=full"], ["layout.verify = 'full'", "use off"]),
    (["rollout.engine=vllm", "layout.transport=peer"], ["layout.transport = 'peer'", "use auto"]),
    (["rollout.engine=vllm", "rollout.cache_strategy=full"], ["rollout.cache_strategy = 'full'", "use adaptive"]),
    (["rollout.engine=vllm", "rollout.vllm={max_model_len: 8}"], ["rollout.vllm.max_model_len = 8", "max_sequence_length"]),
    (
        ["rollout.engine=vllm", "rollout.vllm={enable_sleep_mode: true}", "layout.device=cpu"],
        ["rollout.vllm.enable_sleep_mode = True", "on a CPU vLLM cannot sleep"],
    ),
    ("rollout.vllm={swap_space: 1}", ["rollout.vllm = {'swap_space': 1}", "set engine=vllm"]),
    ("rollout.engine=sglang", ["rollout.engine = 'sglang'", "'megatron', 'hf' or 'vllm'"]),
    (["layout.transport=peer", "layout.training_copy=drop"], ["layout.training_copy = 'drop'", "layout.transport=p2p"]),
    (["layout.train=zero3", "layout.transport=peer", "layout.offload=params"], ["layout.offload", "offload=optimizer"]),
    ("layout.train=tp2.pp2.zero4", ["layout.train", "zero4 does not exist"]),
    ("layout.device=cuda", ["layout.device = 'cuda'", "no usable GPU", "check-env"]),
    ("algorithm.fsdp_config={sharding_strategy: FULL_SHARD}", ["algorithm.fsdp_config", "zero3", "tp2.pp2.zero1"]),
    ("algorithm.fsdp_config={sharding_strategy: HYBRID}", ["algorithm.fsdp_config", "FULL_SHARD"]),
    (
        ["layout.train=tp1.pp2", "algorithm.fsdp_config={sharding_strategy: FULL_SHARD}"],
        ["layout.train = 'tp1.pp2.dp2.zero3'", "zero1 with pp=2"],
    ),
    (
        ["layout.train=tp1.pp1", "algorithm.batch_size=3", "rollout.n=2"],
        ["algorithm.mini_batch_size = 3", "6 responses", "dp = 4"],
    ),
    # files
    ("data.train=rows.jsonl", ["data.train = 'rows.jsonl'", "no such file"]),
    ("model.tokenizer=tok", ["model.tokenizer = 'tok'", "no such directory"]),
    ("data.train=reasoning_gym:chain_sum", ["model.tokenizer = None", "random weights bring no tokenizer"]),
    ("reward.function=no_such_module:f", ["reward.functions.0.function = 'no_such_module:f'", "no such module"]),
    ("reward.function=no/such.py:f", ["reward.functions.0.function", "no such module or file"]),
    ("trainer.resume=runs/none", ["trainer.resume = 'runs/none'", "auto, never or a directory"]),
    (["model.random=null", "model.path=smollm"], ["model.path = 'smollm'", "rl3d prepare smollm"]),
    (["model.random=null", "model.path=a/b"], ["model.path = 'a/b'", "there is no directory", "hf download a/b"]),
    (["model.random=null", "model.path=./a/b"], ["model.path = './a/b'", "no such directory"]),
    # the command line itself
    ("algorithm.lr", ["'algorithm.lr'", "expected key=value"]),
    ("data.train.0.weight=2", ["data.train.0.weight", "set data.train as a whole"]),
    ("algorithm.betas=[0.9", ["algorithm.betas=[0.9", "not valid YAML"]),
]


@pytest.mark.parametrize(("overrides", "words"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_refused(config_file: Path, overrides: str | list[str], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_file.parent)
    with pytest.raises(ConfigError) as caught:
        given = [overrides] if isinstance(overrides, str) else overrides
        check(resolve(load_config(config_file, given), gpus=0))
    lines = str(caught.value).splitlines()
    assert any(all(word in line for word in words) for line in lines), caught.value


# (query heads, kv heads, layers, ffn, train, gen, words; None: runs)
MODELS = [
    (9, 3, 30, 1536, "tp1.pp2", "tp1", None),
    (9, 3, 30, 1536, "tp1.pp1", "tp2", ["layout.gen = 'tp2'", "9 query heads do not divide by tp=2", "tp 1 or 3"]),
    (9, 3, 30, 1536, "tp3.pp1", "tp3", None),
    (9, 3, 3, 1536, "tp1.pp4", "tp1", ["layout.train", "3 layers do not fill pp = 4 stages", "lower pp"]),
    (8, 2, 4, 64, "tp4.pp1", "tp8", None),  # tp above the kv heads: a multiple of them
    (12, 4, 4, 96, "tp1.pp1", "tp6", ["layout.gen = 'tp6'", "neither divides the 4 key/value heads", "tp 1 or 2 or 4"]),
    (6, 2, 4, 64, "tp2.pp1", "tp6", ["layout.gen = 'tp6'", "feed-forward size 64 does not divide by tp=6"]),
    (4, 1, 4, 64, "tp4.pp1", "tp4", None),
    (4, None, 4, 64, "tp4.pp1", "tp4", None),  # no num_key_value_heads: as many as query heads
]


@pytest.mark.parametrize(("heads", "kv", "layers", "ffn", "train", "gen", "words"), MODELS)
def test_model_must_divide(
    config_file: Path, heads: int, kv: int | None, layers: int, ffn: int, train: str, gen: str, words: list[str] | None
) -> None:
    sizes = f"num_attention_heads: {heads}, num_hidden_layers: {layers}, intermediate_size: {ffn}"
    sizes += f", num_key_value_heads: {kv}" if kv else ""
    overrides = [f"model.random.config={{{sizes}}}", f"layout.train={train}", f"layout.gen={gen}", "layout.ranks=24"]
    overrides += ["algorithm.batch_size=24"]
    cfg = resolve(load_config(config_file, overrides), gpus=0)
    if words is None:
        check(cfg)
        return
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    assert any(all(word in line for word in words) for line in str(caught.value).splitlines()), caught.value


def test_model_that_says_nothing(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="does not say num_hidden_layers, intermediate_size"):
        check(resolve(load_config(config_file, ["model.random.config={num_attention_heads: 4}"]), gpus=0))


def test_context_longer_than_the_model(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="model.max_sequence_length = 208: longer than .* = 128"):
        check(resolve(load_config(config_file, ["data.max_prompt_tokens=200"]), gpus=0))


def test_all_problems_at_once(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, ["rollout.n=x", "algorithm.clip_coef=3", "trainer.nam=y", "deepspeed.fp16.enabled=true"])
    assert [p.key for p in caught.value.problems] == ["rollout.n", "algorithm.clip_coef", "trainer.nam"]
    assert str(caught.value).splitlines()[0] == f"{config_file} cannot run:"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: x}\nmodel: {path: y}", "line 2: the key 'model' is given twice"),
        ("model: [", "not valid YAML"),
        ("- a\n- b", "expected sections"),
        ("", "model: missing"),
        ("model:\n  path: x\n", "data: missing"),
        ("1: 2", "1 = 2: unknown key"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value)


def test_missing_file_names_its_neighbours(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"rum\.yaml: no such configuration file; there are .*run\.yaml"):
        load_config(config_file.with_name("rum.yaml"))


def test_standalone_algorithm() -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig(batch_size=10, mini_batch_size=4, clip_coef=0.2)
    assert str(caught.value) == "mini_batch_size = 4: does not divide batch_size = 10; choose one of [1, 2, 5, 10]"
    with pytest.raises(ConfigError, match="clip_coeff = 0.2: unknown key; did you mean 'clip_coef'"):
        PPOConfig(clip_coeff=0.2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("megatron", {"context_parallel_size": 2}),
        ("megatron", {"num_moe_experts": 8}),
    ],
)
def test_settings_that_would_train_wrongly_are_refused(section, values):
    (problem,) = passthrough_problems(section, values)
    assert problem.key.startswith(section) and "cannot train with it" in problem.text


def test_other_settings_of_the_libraries_pass():
    assert passthrough_problems("deepspeed", {"zero_optimization": {"reduce_bucket_size": 1000}}) == []
    assert passthrough_problems("megatron", {"attention_softmax_in_fp32": True}) == []
