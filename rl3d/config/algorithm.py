"""The algorithm section: :class:`PPOConfig`, usable on its own in a script."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rl3d.config.base import ConfigError, Problem, Section

# verl's names for the three estimators of http://joschu.net/blog/kl-approx.html
_KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
"""ZeRO stage that each of PyTorch's FSDP sharding strategies means."""


def zero_stage_from_fsdp(fsdp_config: dict[str, Any] | None) -> int | None:
    """ZeRO stage of an FSDP configuration: FULL_SHARD 3, SHARD_GRAD_OP 2, NO_SHARD 0; None for None.

    Raises :class:`ConfigError` for another strategy or another key.
    """
    if fsdp_config is None:
        return None
    strategy = fsdp_config.get("sharding_strategy")
    if strategy not in FSDP_STAGES or len(fsdp_config) != 1:
        raise ConfigError(
            Problem(
                "fsdp_config",
                f"expected one key, sharding_strategy, with one of {', '.join(FSDP_STAGES)}; "
                "for anything else write the ZeRO stage in layout.train, for example tp1.pp1.zero1",
                fsdp_config,
            )
        )
    return FSDP_STAGES[strategy]


class PPOConfig(Section):
    """How the policy learns. ``PPOConfig(batch_size=32, mini_batch_size=8, ppo_epochs=4)`` works without a file.

    Raises :class:`~rl3d.config.base.ConfigError` naming every key that is off.
    """

    name: Literal["grpo", "ppo"] = Field(
        default="grpo",
        description="Advantage estimator. grpo: reward relative to the other samples of the same prompt. ppo: GAE with a "
        "critic, or without one (use_critic=false) whitened returns (REINFORCE++).",
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts sampled in one step.")
    mini_batch_size: int = Field(
        default=32,
        ge=1,
        description="Prompts per optimiser step (times rollout.n responses); divides batch_size, which is the default.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Passes over each batch of samples.")
    clip_coef: float = Field(default=0.2, gt=0, lt=1, description="Clip range of the probability ratio: 1 ± clip_coef.")
    clip_coef_high: float | None = Field(
        default=None,
        gt=0,
        description="Upper clip range when it differs from the lower one (DAPO's clip-higher); null: same.",
    )
    max_grad_norm: float = Field(default=1.0, ge=0, description="Gradient clipping by global L2 norm; 0 turns it off.")
    kl_coef: float = Field(
        default=0.001, ge=0, description="Weight of the KL penalty to the reference model; 0 turns it off."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="KL estimator of each token; verl's kl, mse and low_var_kl are accepted for k1, k2 and k3. Not "
        "given: k3 in the loss, k1 in the reward.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="Where the KL penalty enters. Not given: the loss for grpo, the reward of each token for ppo.",
    )
    entropy_coef: float = Field(default=0.0, description="Weight of the entropy bonus in the loss.")
    norm_adv_by_std: bool = Field(
        default=True, description="Divide advantages by the standard deviation of their prompt's group (off: Dr. GRPO)."
    )
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean", description="How token losses become one number; always over the global mini-batch."
    )
    lr: float = Field(default=1e-6, ge=0, description="Peak learning rate of AdamW.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's two decay rates.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's decoupled weight decay.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up, over all optimiser steps of the run."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimiser steps of linear warm-up from zero.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Floor of the schedule as a fraction of lr.")
    micro_batch_tokens: int = Field(default=4096, ge=1, description="Tokens in one packed micro-batch on one rank.")
    logprob_chunk_tokens: int = Field(
        default=1024, ge=1, description="Tokens whose fp32 logits exist at a time in the log-probability and the loss."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount of rewards over tokens; ppo.")
    lam: float = Field(
        default=1.0, ge=0, le=1, description="GAE's lambda, ppo with a critic; 1 suits a score at the end, as in verl."
    )
    use_critic: bool = Field(
        default=False, description="A value model beside the policy. Not given: yes for ppo; grpo has none."
    )
    critic_model: str | None = Field(
        default=None,
        description="Directory or hub id of the critic: a sequence or token classifier with one label, or a language "
        "model whose backbone gets a new head; null: the policy's backbone.",
    )
    critic_lr: float = Field(default=1e-5, ge=0, description="Peak learning rate of the critic's own AdamW.")
    critic_warmup_steps: int = Field(default=0, ge=0, description="Optimiser steps of linear warm-up of critic_lr.")
    critic_only_steps: int = Field(
        default=0, ge=0, description="First training steps that train the critic only (verl's trainer.critic_warmup)."
    )
    freeze_critic: bool = Field(
        default=False, description="Use critic_model as it is: no gradients, no optimiser memory, no updates."
    )
    critic_residency: Literal["device", "host"] = Field(
        default="device", description="Where the critic, optimiser included, stays between its uses."
    )
    value_clip: float = Field(
        default=0.5, gt=0, description="A new value further than this from the old one is clipped in the value loss."
    )
    vf_coef: float = Field(
        default=0.5,
        ge=0,
        description="Factor of the critic's loss. The critic has an optimiser of its own and AdamW does not mind scale, so "
        "it decides only how soon max_grad_norm clips.",
    )
    reference: Literal["kept", "none"] = Field(
        default="kept", description="kept: a frozen reference model for the KL penalty; none: no such model."
    )
    reference_model: str | None = Field(
        default=None,
        description="Directory or hub id of the reference, same architecture; null: a copy of the initial weights.",
    )
    reference_residency: Literal["device", "host"] = Field(
        default="device", description="Where the reference model stays between its uses; host frees GPU memory."
    )
    fsdp_config: dict[str, Any] | None = Field(
        default=None,
        description='FSDP\'s way to say the ZeRO stage: {"sharding_strategy": FULL_SHARD | SHARD_GRAD_OP | NO_SHARD} '
        "means 3, 2, 0.",
    )

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _kl_alias(cls, value: Any) -> Any:
        return _KL_NAMES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_depend(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        ppo = values.get("name") == "ppo"
        kl_in = values.get("kl_in") or ("reward" if ppo else "loss")
        defaults = {
            "use_critic": ppo,
            "kl_in": kl_in,
            "kl_estimator": "k1" if kl_in == "reward" else "k3",
        }
        if "batch_size" in values:
            defaults["mini_batch_size"] = values["batch_size"]
        return {**values, **{key: value for key, value in defaults.items() if values.get(key) is None}}

    @model_validator(mode="after")
    def _consistent(self) -> "PPOConfig":
        problems = []
        if self.batch_size % self.mini_batch_size:
            options = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            problems.append(
                Problem(
                    "mini_batch_size",
                    f"does not divide batch_size = {self.batch_size}; choose one of {options}",
                    self.mini_batch_size,
                )
            )
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                problems.append(Problem(f"betas.{index}", "expected at least 0 and less than 1", beta))
        if self.kl_coef > 0 and self.reference == "none":
            problems.append(
                Problem("reference", f"kl_coef = {self.kl_coef} needs a reference; set kl_coef=0 or keep it", "none")
            )
        if self.reference_model is not None and not self.needs_reference:
            text = f"nothing uses a reference with kl_coef = {self.kl_coef} and reference = {self.reference}; remove it"
            problems.append(Problem("reference_model", text, self.reference_model))
        problems += self._critic_problems()
        try:
            zero_stage_from_fsdp(self.fsdp_config)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return self

    def _critic_problems(self) -> list[Problem]:
        problems = []
        if self.use_critic and self.name == "grpo":
            problems.append(Problem("use_critic", "grpo has no critic; set use_critic=false, or name=ppo", True))
        if not self.use_critic:
            for key in ("critic_model", "critic_only_steps", "freeze_critic"):
                if getattr(self, key):
                    text = "there is no critic; remove it, or set name=ppo and use_critic=true"
                    problems.append(Problem(key, text, getattr(self, key)))
        elif self.freeze_critic and self.critic_model is None:
            text = "a new value head that never learns is 0 everywhere; give a trained one with critic_model"
            problems.append(Problem("freeze_critic", text, True))
        elif self.freeze_critic and self.critic_only_steps:
            text = "a frozen critic has no steps of its own; set critic_only_steps=0"
            problems.append(Problem("critic_only_steps", text, self.critic_only_steps))
        return problems

    @property
    def clip_low(self) -> float:
        """Lower clip range of the ratio: 1 - clip_low."""
        return self.clip_coef

    @property
    def clip_high(self) -> float:
        """Upper clip range of the ratio: 1 + clip_high."""
        return self.clip_coef if self.clip_coef_high is None else self.clip_coef_high

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model has to exist: there is a KL penalty to pay."""
        return self.reference == "kept" and self.kl_coef > 0

    @property
    def mini_batches(self) -> int:
        """Optimiser steps in one pass over a batch."""
        return self.batch_size // self.mini_batch_size
