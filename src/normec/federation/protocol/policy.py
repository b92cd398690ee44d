"""What a party allows: its own file, which no server can change.

    epsilon = 8.0            # of everything this party ever sends, all runs together
    delta = 1e-5
    unit = "client"          # or "record"
    relation = "zero-out"    # or "replace"
    least_sigma = 1.0        # the noise an observer faces, in units of a message's bound
    methods = ["normec"]     # which methods; those of an installed package too, and FILE.py:CLASS beside this file
    trusts = ["local"]       # add "central" where the server may see messages before the noise
    runs = ["any"]           # or the names of the runs to take part in
    largest_model = 10000000
    simulation = false       # true allows noise="seeded", which protects nobody
    allow_without_noise = false
    report_loss = false      # the training loss, which no noise covers

The settings of a method come from the server; its code is the party's own. A method of one's own must therefore check
its settings, and state a `bound` that holds for each of them.

A request that breaks a rule is refused. The server hears one of `wire.REASONS`; the exact reason stays in the party's
log.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...algorithms import registry
from ...errors import UsageError, nearest
from ...privacy.release import Release
from .terms import LATER, NOISES, short_name
from .wire import NAME, Request, run_name

# The noise an observer may face, over the message's bound. With less a message would not fit the noise's grid; with
# more a message says nothing, and the account would count billions of them as nothing.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


class Verdict(NamedTuple):
    """Why a request is refused: the word for the server, and the sentence for the party's own log."""

    reason: str
    exact: str


class Policy(BaseModel):
    """The rules of one party. Everything has a careful default but the budget."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    unit: Literal["client", "record"] = "client"
    relation: Literal["zero-out", "replace"] = "zero-out"
    least_sigma: float = Field(default=1.0, ge=LEAST_NOISE, le=MOST_NOISE, allow_inf_nan=False)
    methods: list[str] = Field(default=["normec", "clip21", "dpsgd"], min_length=1)
    trusts: list[Literal["local", "central"]] = Field(default=["local"], min_length=1)
    runs: list[str] = Field(default=["any"], min_length=1)
    largest_model: int = Field(default=10_000_000, ge=1)
    simulation: bool = False
    allow_without_noise: bool = False
    report_loss: bool = False

    def check(self, request: Request) -> Verdict | None:
        """What does not depend on the ledger; None if the request may be answered."""
        terms, method = request.privacy, request.method
        if "any" not in self.runs and run_name(request.run) not in self.runs:
            return Verdict("terms", f"run {run_name(request.run)} is not among runs = {self.runs}")
        if len(request.x) > self.largest_model:
            return Verdict("terms", f"{len(request.x)} parameters are more than largest_model = {self.largest_model}")
        if method.name not in map(short_name, self.methods):
            return Verdict("terms", f"method {method.name} is not among methods = {self.methods}")
        if terms.noise not in NOISES:
            return Verdict("terms", f"unknown noise {terms.noise}")
        if terms.noise == "none":
            if self.allow_without_noise:
                return None
            return Verdict("noise", "the run has no noise, and allow_without_noise = false")
        if self.epsilon is None:
            return Verdict("budget", "the policy has no epsilon, so nothing may be spent")
        if terms.noise == "seeded" and not self.simulation:
            return Verdict("noise", "seeded noise protects nobody, and simulation = false")
        if terms.trust == "secure-sum":
            return Verdict("terms", LATER)
        if terms.trust not in self.trusts:
            return Verdict("terms", f"trust {terms.trust} is not among trusts = {self.trusts}")
        if (terms.unit, terms.relation) != (self.unit, self.relation):
            return Verdict(
                "terms",
                f"the run protects {terms.unit} by {terms.relation}, the party's account is kept for "
                f"{self.unit} by {self.relation}",
            )
        return None

    def check_noise(self, request: Request, release: Release) -> Verdict | None:
        """Hold σ over the bound, as the observer faces it, against `least_sigma` and `MOST_NOISE`.

        `release.gain` is the observer's noise over one client's: 1 under local trust, √n under central trust. The bound
        is that of a message with its weight in the sum.
        """
        faced = request.privacy.sigma * release.gain / (release.bound * release.heaviest)
        if faced < self.least_sigma:
            return Verdict("noise", f"sigma over the bound is {faced:.6g}, below least_sigma = {self.least_sigma:g}")
        if faced > MOST_NOISE:
            return Verdict("noise", f"sigma over the bound is {faced:.6g}, above {MOST_NOISE:g}: nothing but noise")
        return None

    @property
    def budget(self) -> float:
        return self.epsilon if self.epsilon is not None else math.inf


def load_policy(path: str | Path) -> Policy:
    """The policy in a TOML file; what is wrong is said in one line."""
    path = Path(path)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no policy {path}; a party takes part only under its own rules") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    known = Policy.model_fields
    for name in given:
        if name not in known:
            raise UsageError(f"{path}: there is no rule {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    try:
        policy = Policy.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}") from None
    if policy.epsilon is None and not policy.allow_without_noise:
        raise UsageError(f"{path}: epsilon is missing; give the budget of all this party's runs together")
    policy = policy.model_copy(update={"methods": [_found(path, name) for name in policy.methods]})
    known_by = [short_name(name) for name in policy.methods]
    for name in known_by:
        if known_by.count(name) > 1:
            raise UsageError(f"{path}: methods: two are known as {name}; rename one of the classes")
    for run in policy.runs:
        if not NAME.fullmatch(run):
            raise UsageError(f"{path}: runs: {run!r} is no name of a run; letters, digits, dot, dash, underscore")
    return policy


def _found(policy: Path, name: str) -> str:
    """A method that a policy names, its file beside the policy; refuses one that is not there."""
    file, colon, kind = name.rpartition(":")
    name = f"{policy.parent / file}:{kind}" if colon else name
    try:
        registry.find(name)
    except UsageError as error:
        raise UsageError(f"{policy}: methods: {error}") from None
    return name
