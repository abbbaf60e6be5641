"""What a configuration means: defaults, overrides, resolution by machine, the dump."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl3d.config import (
    ConfigError,
    PPOConfig,
    check,
    count_gpus,
    explain,
    load_config,
    model_dir,
    resolve,
    zero_stage_from_fsdp,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))


def write(tmp_path: Path, layout: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: m}}\nlayout: {layout}\ndata: {{train: 'reasoning_gym:chain_sum'}}\n"
        "reward: {function: reasoning_gym}\nrollout: {stop: END, top_k: -1}\n"
    )
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_files(path: Path, tmp_path: Path) -> None:
    cfg = load_config(path)
    assert cfg.trainer.name == path.stem
    final = resolve(cfg, gpus=0)
    assert resolve(final) == final
    dump = tmp_path / "resolved.yaml"
    dump.write_text(final.to_yaml())
    assert load_config(dump) == final


@pytest.mark.parametrize(
    ("gpus", "world", "train", "ranks", "device", "dtype"),
    [
        (0, None, "tp1.pp2.dp1.zero1", 2, "cpu", "float32"),
        (1, None, "tp1.pp1.dp1.zero1", 1, "cuda", "bfloat16"),
        (2, None, "tp1.pp2.dp1.zero1", 2, "cuda", "bfloat16"),
        (8, None, "tp1.pp2.dp1.zero1", 2, "cuda", "bfloat16"),
        (8, 1, "tp1.pp1.dp1.zero1", 1, "cuda", "bfloat16"),  # one rank was started on a machine of eight
    ],
)
def test_quickstart_by_machine(gpus: int, world: int | None, train: str, ranks: int, device: str, dtype: str) -> None:
    cfg = resolve(load_config(ROOT / "configs/quickstart.yaml", ["model.dtype=auto"]), world_size=world, gpus=gpus)
    assert (cfg.layout.train, cfg.layout.ranks, cfg.layout.device) == (train, ranks, device)
    assert cfg.model.dtype == dtype


def test_quickstart_started_with_too_many_ranks() -> None:
    with pytest.raises(ConfigError, match="layout.ranks = 2: 4 ranks were started; start 2"):
        resolve(load_config(ROOT / "configs/quickstart.yaml"), world_size=4, gpus=8)


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout.ranks = 4: only 1 GPU on this machine"):
        resolve(load_config(write(tmp_path, "{ranks: 4}")), gpus=1)


@pytest.mark.parametrize(
    ("layout", "ranks", "train"),
    [
        ("{train: tp2.pp2, gen: tp1}", 4, "tp2.pp2.dp1.zero1"),
        ("{train: tp1.pp2, gen: tp4}", 4, "tp1.pp2.dp2.zero1"),
        ("{train: pp3, gen: tp2}", 6, "tp1.pp3.dp2.zero1"),
        ("{train: tp2.dp4, gen: tp2}", 8, "tp2.pp1.dp4.zero1"),
        ("{}", 1, "tp1.pp1.dp1.zero1"),
    ],
)
def test_fewest_ranks_on_a_cpu(tmp_path: Path, layout: str, ranks: int, train: str) -> None:
    cfg = resolve(load_config(write(tmp_path, layout)), gpus=0)
    assert (cfg.layout.ranks, cfg.layout.train) == (ranks, train)


def test_gpu_choice_and_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, "{train: tp1, gen: tp1, on_gpus: {2: {train: tp2, gen: tp2}, 8: {train: tp4.pp2, gen: tp8}}}")
    assert resolve(load_config(path), gpus=1).layout.train == "tp1.pp1.dp1.zero1"
    assert resolve(load_config(path), gpus=4).layout.train == "tp2.pp1.dp2.zero1"
    eight = resolve(load_config(path), gpus=8).layout
    assert (eight.train, eight.gen, eight.on_gpus) == ("tp4.pp2.dp1.zero1", "tp8", {})
    typed = resolve(load_config(path, ["layout.train=tp2.pp4"]), gpus=8).layout
    assert (typed.train, typed.gen) == ("tp2.pp4.dp1.zero1", "tp8")  # what is typed wins over on_gpus
    assert resolve(load_config(path, ["layout.device=cpu"]), gpus=8).layout.train == "tp1.pp1.dp1.zero1"


def test_overrides_are_yaml(tmp_path: Path) -> None:
    cfg = load_config(
        write(tmp_path, "{verify: off}"),
        ["algorithm.lr=1e-6", "trainer.loggers=[jsonl]", "deepspeed.zero_optimization.reduce_bucket_size=5e8"]
        + ["algorithm.kl_estimator=low_var_kl", "data.system_prompt=Be brief.", "layout.order=pp-tp-dp"],
    )
    assert cfg.algorithm.lr == 1e-6
    assert cfg.trainer.loggers == ["jsonl"]
    assert cfg.deepspeed == {"zero_optimization": {"reduce_bucket_size": 5e8}}
    assert cfg.algorithm.kl_estimator == "k3"
    assert cfg.layout.verify == "off"
    assert cfg.layout.axis_order == ("pp", "tp", "dp")
    assert (cfg.rollout.stop, cfg.rollout.top_k) == (["END"], 0)


def test_override_with_a_colon_stays_text(tmp_path: Path) -> None:
    cfg = load_config(write(tmp_path, "{}"), ["reward.function=my.module:score", "data.train=tiny:copy"])
    assert cfg.reward.terms[0].function == "my.module:score"
    assert (cfg.data.train[0].kind, cfg.data.train[0].task) == ("tiny", "copy")


def test_resolved_values(tmp_path: Path) -> None:
    cfg = resolve(load_config(write(tmp_path, "{}"), ["trainer.seed=7", "rollout.seed=9"]), gpus=0)
    assert (cfg.data.seed, cfg.rollout.seed) == (7, 9)
    assert cfg.model.max_sequence_length == 512 + 256
    assert [term.function for term in cfg.reward.functions] == ["reasoning_gym"]
    assert cfg.run_dir == Path("runs/run")


def test_model_by_prepared_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/m").mkdir(parents=True)
    text = '{"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 8}'
    (tmp_path / "models/m/config.json").write_text(text)
    cfg = resolve(load_config(write(tmp_path, "{}")), gpus=0)
    assert model_dir(cfg) == Path("models/m")
    assert check(cfg)["num_hidden_layers"] == 2
    (tmp_path / "models/m/config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not readable"):
        check(cfg)


def test_ppo_config_as_promised() -> None:
    cfg = PPOConfig(batch_size=32, mini_batch_size=8, ppo_epochs=4, clip_coef=0.2, vf_coef=0.5, max_grad_norm=1.0)
    assert (cfg.mini_batches, cfg.clip_low, cfg.clip_high) == (4, 0.2, 0.2)
    assert PPOConfig(batch_size=12).mini_batch_size == 12
    assert PPOConfig(clip_coef_high=0.28).clip_high == 0.28
    assert PPOConfig(kl_coef=0).needs_reference is False
    assert PPOConfig().needs_reference is True


def test_what_ppo_means_unless_told_otherwise() -> None:
    cfg = PPOConfig(name="ppo", batch_size=8)
    assert (cfg.use_critic, cfg.kl_in, cfg.kl_estimator, cfg.mini_batch_size) == (True, "reward", "k1", 8)
    assert PPOConfig(name="ppo", use_critic=False).use_critic is False
    assert PPOConfig(name="ppo", kl_in="loss").kl_estimator == "k3"
    grpo = PPOConfig()
    assert (grpo.name, grpo.use_critic, grpo.kl_in, grpo.kl_estimator) == ("grpo", False, "loss", "k3")


def test_fsdp_names() -> None:
    for name, stage in {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}.items():
        assert zero_stage_from_fsdp(PPOConfig(fsdp_config={"sharding_strategy": name}).fsdp_config) == stage
    assert zero_stage_from_fsdp(None) is None


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("3", 1), ("0,9,1", 1), ("GPU-aa,GPU-bb", 2), ("0,1,2,3,0", 4)],
)
def test_gpus_as_the_driver_lists_them(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA (UUID: GPU-$i)"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("rl3d.config.machine._torch_has_cuda", lambda: True)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_a_broken_driver_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("rl3d.config.machine._torch_has_cuda", lambda: True)
    assert count_gpus() == 0


def test_every_key_is_explained() -> None:
    infos = explain()
    assert len(infos) > 100
    assert [info.key for info in infos if not info.meaning] == []
    (lr,) = explain("algorithm.lr")
    assert (lr.kind, lr.default) == ("float", "1e-06")
    assert {info.key for info in explain("max_new_tokens")} == {"rollout.max_new_tokens"}
    with pytest.raises(ConfigError, match="did you mean 'algorithm.lr'"):
        explain("algorithm.rl")


def test_config_does_not_import_torch() -> None:
    code = "import sys, rl3d.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
