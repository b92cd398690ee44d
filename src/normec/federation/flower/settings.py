"""The settings of a federated run: `[tool.flwr.app.config]` in the app's pyproject.toml, or `flwr run -c 'key=value'`.

The names are those of `normec train` (settings/config.py), with a few more for the federation. Flower has no empty
value and does not accept keys that the app does not have, so an empty string means "not given".

`method = "my_method.py:MyMethod"` names a class in a file next to the app's pyproject.toml, and `method_settings` its
settings, such as "tau=0.5,eta=0.3". Each party names its own copy of the file in its policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import UsageError, at_least, first_mistake, nearest
from ...experiments import methods, server
from ...settings.config import FEDERATED, RunConfig
from ...settings.validation import make
from ..protocol.wire import NAME
from ..secure_sum.roster import FEWEST
from ..secure_sum.terms import least_threshold
from .scaffold import app_table

RECORDED = ("data", "model", "clients", *FEDERATED)  # the settings in the folder of a federated run


class Settings(BaseModel):
    """The settings of the federation; `run` holds those that every run has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(default="federation", pattern=f"^{NAME.pattern}$")
    out: str = "runs/federation"
    parties: int = Field(default=2, ge=1)
    min_parties: int | None = Field(default=None, ge=1)
    round_seconds: float = Field(default=600.0, gt=0)
    wait_seconds: float = Field(default=86400.0, gt=0)
    start_seconds: float = Field(default=600.0, gt=0)
    records: str | int | float | None = None
    secure_sum: bool | None = None
    colluding: int = Field(default=1, ge=0)
    run: RunConfig = RunConfig()

    @property
    def least(self) -> int:
        """The number of parties that a round needs: by default all of them, or the threshold of a secure sum."""
        if self.min_parties is not None:
            return self.min_parties
        return max(least_threshold(self.parties), self.colluding + 2) if self.summed else self.parties

    @property
    def summed(self) -> bool:
        """Whether the server sees nothing but secure sums."""
        return self.secure_sum if self.secure_sum is not None else self.run.private and self.run.trust == "secure-sum"

    @property
    def records_of_parties(self) -> list[float] | None:
        """The public numbers of records, one for each party or one for all; None if they are not given."""
        if self.records is None:
            return None
        try:
            found = [float(part) for part in str(self.records).split(",")]
        except ValueError:
            found = []
        if len(found) not in (1, self.parties) or not all(1 <= number < math.inf for number in found):
            raise UsageError(
                f"records must be a number from 1 on for each of the {self.parties} parties, as in 199,172,30, or one "
                f"for all, got {self.records!r}"
            )
        return found


NAMES = (*(name for name in Settings.model_fields if name != "run"), *FEDERATED)


def app_config(app: Path) -> dict[str, Any]:
    """The settings in an app's pyproject.toml. Raises `UsageError` if the folder contains no app."""
    found: dict[str, Any] = app_table(app).get("config", {})
    return found


def read(config: Mapping[str, Any]) -> Settings:
    """Read and check Flower's run configuration. Raises `UsageError` with one line that names the mistake."""
    given: dict[str, Any] = {}
    for key, value in config.items():
        name = key.replace("-", "_")
        if name not in NAMES:
            raise UsageError(f"there is no setting {key!r}{nearest(name, NAMES)}; settings are {', '.join(NAMES)}")
        if value != "":
            given[name] = value
    of_any_run = {name: given.pop(name) for name in FEDERATED if name in given}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        raise UsageError(first_mistake(error)) from None
    settings = settings.model_copy(update={"run": _run(of_any_run, settings)})
    if settings.summed and settings.parties < FEWEST:
        raise UsageError(f"a secure sum has at least {FEWEST} parties, got parties = {settings.parties}")
    if settings.least > settings.parties:
        raise UsageError(f"min_parties must be at most parties = {settings.parties}, got {settings.least}")
    _ = settings.records_of_parties
    return settings


def _run(given: dict[str, Any], settings: Settings) -> RunConfig:
    """The settings that every run has. Unlike in a simulation, the defaults are secure noise and local trust."""
    if given.get("private", True):
        trust = given.setdefault("trust", "secure-sum" if settings.secure_sum else "local")
        if settings.secure_sum is not None and settings.secure_sum != (trust == "secure-sum"):
            raise UsageError(
                f"secure_sum = {str(settings.secure_sum).lower()} contradicts trust = {trust}; leave out one of them"
            )
        given.setdefault("noise", "secure")
        # With a noisy memory, the server can compute it too, and a party that lost its disk gets it back at no cost.
        given.setdefault("memory", "noisy" if trust == "local" else "clean")
    run = make({**given, "data": settings.name, "model": "of the app", "clients": settings.parties})
    at_least(0, seed=run.public_seed)
    methods.step_size(run)  # raises if the method has no default and none is given
    methods.local_steps(run)  # so does this, for the step size of local steps
    server.check(run)
    for name in ("rounds", "batch_size", "evaluate_every"):
        if getattr(run, name) is not None:
            at_least(1, **{name: getattr(run, name)})
    return run


def named_by_a_command(method: str, app: Path | None) -> str:
    """The name of a method as a command line gives it, with the whole path of a file that the app does not have.

    The file of a class is looked up in the folder of the app, and then in the working folder.
    """
    file, colon, kind = method.rpartition(":")
    here = bool(colon) and Path(file).is_file() and not (app is not None and (app / file).is_file())
    return f"{Path(file).resolve()}:{kind}" if here else method


def located(method: str, app: Path) -> str:
    """The name of a method, with the path of its file in the app's folder if it has one."""
    file, colon, kind = method.rpartition(":")
    return f"{(app / file).resolve()}:{kind}" if colon else method
