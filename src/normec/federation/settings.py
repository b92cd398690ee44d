"""The settings of a federated run: `[tool.flwr.app.config]` in the app's pyproject.toml, or `flwr run -c 'key=value'`.

The names are those of `normec train` (lab/config.py), and a few more for the federation itself. Flower knows no empty
value and lets nobody add a key that the app does not have; so an empty string stands for "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import UsageError, nearest
from ..lab.config import RunConfig
from .terms import LATER

# What the settings share with any other run, in the names of lab/config.py.
OF_THE_LAB = (
    *("method", "alpha", "beta", "server_norm", "decay", "tau", "compressor", "k"),
    *("private", "epsilon", "delta", "unit", "relation", "trust", "sigma", "noise", "memory"),
    *("lr", "rounds", "batch_size", "seed", "evaluate_every"),
)


class Settings(BaseModel):
    """One federated run. Unlike in a simulation the noise is secure and the trust local unless told otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["normec", "clip21", "ef21", "dpsgd-norm", "dpsgd-clip", "gd"] = "normec"
    alpha: float | None = None
    beta: float | None = None
    server_norm: bool | None = None
    decay: float | None = None
    tau: float | None = None
    compressor: Literal["topk", "randk"] | None = None
    k: int | None = None

    private: bool = True
    epsilon: float | None = None
    delta: float | None = None
    unit: Literal["client", "record"] | None = None
    relation: Literal["zero-out", "replace"] | None = None
    trust: Literal["local", "secure-sum", "central"] | None = None
    sigma: float | None = None
    noise: Literal["seeded", "secure", "exact"] | None = None
    memory: Literal["clean", "noisy"] | None = None

    lr: float | None = None
    rounds: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    evaluate_every: int | None = Field(default=None, ge=1)

    name: str = Field(default="federation", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    out: str = "runs/federation"
    parties: int = Field(default=2, ge=1)
    min_parties: int | None = Field(default=None, ge=1)
    round_seconds: float = Field(default=600.0, gt=0)
    start_seconds: float = Field(default=600.0, gt=0)
    poll_seconds: float = Field(default=0.5, gt=0)

    @property
    def least(self) -> int:
        """How many parties a round needs: all, unless told otherwise."""
        return self.parties if self.min_parties is None else self.min_parties


def read(config: Mapping[str, Any]) -> Settings:
    """Checked settings from Flower's run configuration; what is wrong is said in one line."""
    fields = Settings.model_fields
    given = {}
    for key, value in config.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise UsageError(f"there is no setting {key!r}{nearest(name, fields)}; settings are {', '.join(fields)}")
        if value != "":
            given[name] = value
    if given.get("trust") == "secure-sum":
        raise UsageError(LATER)
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']!r}") from None
    if settings.least > settings.parties:
        raise UsageError(f"min_parties must be at most parties = {settings.parties}, got {settings.least}")
    return settings


def run_config(settings: Settings, data: str, model: str) -> RunConfig:
    """The settings as those of any other run, for the method, the privacy terms and the run's folder."""
    known = settings.model_dump(include=set(OF_THE_LAB), exclude_none=True)
    if settings.private:
        trust = known.setdefault("trust", "local")
        known.setdefault("noise", "secure")
        # What the server saw is all that the memory is made of: a party that lost its disk gets it back at no cost.
        known.setdefault("memory", "noisy" if trust == "local" else "clean")
    return RunConfig(data=data, model=model, clients=settings.parties, **known)
