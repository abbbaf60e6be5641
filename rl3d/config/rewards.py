"""One reward: a Python function, a model or a service, and the settings of each kind."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rl3d.config.base import ConfigError, Problem, Section

PositiveInt = Annotated[int, Field(ge=1)]

_REWARD_KEYS = {
    "model": ("device", "residency"),
    "url": ("timeout_s", "retries", "concurrency", "samples_per_request", "headers"),
}


class RewardFunction(Section):
    """One reward among several: a Python function, a model, or a service."""

    function: str | None = Field(
        default=None, description="module:name, file.py:name, or reasoning_gym (the task's own verifier)."
    )
    model: str | None = Field(
        default=None,
        description="Instead of function: directory or hub id of a sequence classifier with one label, which scores prompt "
        "and response in its own chat template; on a GPU after sampling, on a CPU beside it.",
    )
    url: str | None = Field(
        default=None, description="Instead of function: http(s) address of a service that answers a POST with scores."
    )
    weight: float = Field(default=1.0, description="Weight in the sum.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments passed with every call; of a url, what else the request holds."
    )
    device: Literal["auto", "cpu"] = Field(
        default="auto", description="Of a model: where it runs; auto: where the policy runs."
    )
    residency: Literal["device", "host"] = Field(
        default="device", description="Of a model: host keeps its weights in host memory except while it scores."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Of a url: seconds for one attempt; null: reward.timeout_s."
    )
    retries: int = Field(
        default=3, ge=0, description="Of a url: further attempts after a time-out, a broken connection, 429 or 5xx."
    )
    concurrency: PositiveInt = Field(default=8, description="Of a url: requests at one time from one replica.")
    samples_per_request: PositiveInt = Field(default=1, description="Of a url: most samples in one request.")
    headers: dict[str, str] = Field(
        default_factory=dict, description="Of a url: sent with each request; ${NAME} is an environment variable."
    )

    @field_validator("function")
    @classmethod
    def _form(cls, value: str | None) -> str | None:
        if value not in (None, "reasoning_gym") and not re.fullmatch(r"[\w./\\-]+:[A-Za-z_][\w.]*", str(value)):
            raise ValueError("expected module:name, file.py:name or reasoning_gym")
        return value

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"https?://[^/\s]+", value):
            raise ValueError("expected http://host[:port]/path or https://...")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> "RewardFunction":
        kinds = [kind for kind in ("function", "model", "url") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            text = f"give one of function, model and url; there is {' and '.join(kinds) or 'none'}"
            raise ConfigError(Problem("function", text, self.function))
        for kind, keys in _REWARD_KEYS.items():
            for key in keys if kind != kinds[0] else ():
                value = getattr(self, key)
                if value != type(self).model_fields[key].get_default(call_default_factory=True):
                    raise ConfigError(
                        Problem(key, f"a setting of {kind}, and this reward is a {kinds[0]}; remove it", value)
                    )
        if self.kwargs and self.model is not None:
            raise ConfigError(Problem("kwargs", "a model takes none; remove them", self.kwargs))
        return self

    @property
    def what(self) -> str:
        """The function, model or address."""
        return self.function or self.model or self.url or ""
