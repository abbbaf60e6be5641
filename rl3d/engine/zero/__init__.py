"""DeepSpeed ZeRO around a megatron-core module: the only place that touches DeepSpeed's internals (0.19).

| stage | PP | fp32 | bf16 | gradients between the micro-batches of a step |
|---|---|---|---|---|
| 0 | any | ``ReplicatedEngine`` | as stage 1 | whole |
| 1 | any | ``WholeGradientsEngine`` | ``WholeGradientsEngine`` | whole |
| 2 | 1 | ``ScatteredGradientsEngine`` | ``ScatteredGradientsEngine`` | 1/dp and a bucket |
| 2 | more | as stage 1 | as stage 1 | whole |
| 3 | 1 | ``ShardedEngine`` | ``ShardedEngine`` | 1/dp and a bucket |
"""

from typing import Any

import torch

from rl3d.config import zero_problem
from rl3d.distributed.groups import ModelGroups
from rl3d.engine.zero.base import AdamSettings, ZeroEngine
from rl3d.engine.zero.partitioned import ScatteredGradientsEngine, WholeGradientsEngine
from rl3d.engine.zero.replicated import ReplicatedEngine
from rl3d.engine.zero.sharded import ShardedEngine
from rl3d.layout import TrainLayout

__all__ = ["AdamSettings", "ZeroEngine", "build_zero", "deepspeed_config", "stage_run"]


def stage_run(stage: int, pp: int, bf16: bool) -> tuple[int, str]:
    """The stage that a layout is run at, and why it differs from what was asked for ("" when it does not)."""
    if stage == 0 and bf16:
        return 1, "zero0 in bfloat16 is run as zero1: DeepSpeed's stage 0 corrects Adam's bias wrongly there"
    if stage == 2 and pp > 1:
        return 1, "zero2 with pipeline stages is run as zero1: gradients stay whole until the pipeline has drained"
    return stage, ""


def build_zero(model: torch.nn.Module, groups: ModelGroups, stage: int, settings: AdamSettings,
               overrides: dict[str, Any] | None = None, offload: str = "none") -> ZeroEngine:  # fmt: skip
    """Put ``model`` under ZeRO. Collective over all ranks.

    Args:
        stage: ZeRO stage asked for; :func:`stage_run` says which one runs.
        overrides: the user's ``deepspeed:`` section, merged over ours.
        offload: ``"none"``; ``"optimizer"``: master weights and moments live in host memory and the step runs there;
            ``"params"``: the weights rest there as well (stage 3).

    Raises:
        ValueError: stage 3 with pipeline stages, or an ``offload`` that the stage has nothing for.
    """
    if (problem := zero_problem(TrainLayout(groups.tp_size, groups.pp_size, groups.dp_size, stage), offload)) is not None:
        raise ValueError(problem)
    parameters = [p for p in model.parameters() if p.requires_grad]
    bf16 = parameters[0].dtype == torch.bfloat16
    stage, _ = stage_run(stage, groups.pp_size, bf16)
    numel = sum(p.numel() for p in parameters)
    config = deepspeed_config(settings, stage, bf16, numel, offload, parameters[0].is_cuda, overrides or {})
    kinds = (ReplicatedEngine, WholeGradientsEngine, ScatteredGradientsEngine, ShardedEngine)
    return kinds[stage](model, groups, settings, config)


def deepspeed_config(settings: AdamSettings, stage: int, bf16: bool, numel: int, offload: str, pin: bool,
                     overrides: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """DeepSpeed's configuration for a stage that runs.

    Args:
        numel: this rank's parameters; buckets need not be larger.
        pin: whether host memory can be pinned (there is a CUDA device).
        overrides: merged over the rest.
    """
    # elements, an even number of them; DeepSpeed's default of 500M would stage 2 GB in fp32
    bucket = min(numel + numel % 2, 50_000_000)
    zero: dict[str, Any] = {
        "stage": stage, "overlap_comm": False, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
    }  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # megatron-core's schedule owns micro-batches
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": settings.max_grad_norm if stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if stage >= 2:
        config["managed_gradient_accumulation"] = False  # a step ends when we say so
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket
        zero["stage3_param_persistence_threshold"] = 10_000  # norms and biases stay whole
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
        config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW, which needs no compiler
    if offload == "params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    if bf16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return _merge(config, overrides)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
