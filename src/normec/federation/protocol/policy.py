"""The policy of a party: a file of its own with its rules, which no server can change.

    epsilon = 8.0            # the budget of all messages of this party, in all runs together
    delta = 1e-5
    unit = "client"          # what the budget protects: this party with all its data, or every single "record"
    units = ["client"]       # the runs to take part in, by what they protect; default: `unit` alone
    record_epsilon = 1.0     # with unit = "client", a second budget for every single record; default: none
    relation = "zero-out"    # or "replace"
    least_sigma = 1.0        # the least noise that an observer must face, in units of a message's bound; in runs with
                             # unit = "record", in units of what one record can change
    largest_record_clip = 1.0  # of runs with unit = "record", which must then clip records; default: no rule
    methods = ["normec"]     # classes of methods, also of installed packages, FILE.py:CLASS, and names as "fedavg"
                             # (`allowed_methods`)
    trusts = ["local"]       # add "secure-sum" for sums with the parties in `roster`, and "central" if the server may
                             # see messages without noise
    roster = "roster.toml"   # with secure-sum: the parties and their keys
    identity = "identity.pem"  # with secure-sum: the party's own key
    least_colluding = 1      # sums must stay private if so many other parties help the server
    accept_loss = false      # true continues a secure sum after the party's folder was lost or restored from a copy
    runs = ["any"]           # or the names of the runs to take part in
    largest_model = 10000000
    most_local_steps = 1000  # of a round: what one request may cost in time
    simulation = false       # true allows noise="seeded", which protects nobody
    allow_without_noise = false
    report_loss = false      # the training loss, which no noise covers
    witness = "/PATH"        # a file outside the party's folder that also counts the ledger's lines; default: none

Paths are relative to the folder of the file.

The settings of a method come from the server, and its code from the party. A custom method must therefore check its
settings, and state a `bound` that holds for all of them.

A request that violates a rule is refused. The server receives one of `wire.REASONS`; the exact reason stays in the
party's log.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...algorithms import registry
from ...errors import UsageError, first_mistake, nearest
from ...privacy.release import Release
from .allowed_methods import allowed, classes
from .price import least_noise
from .terms import NOISES, short_name
from .wire import NAME, Request, run_name

# The noise that an observer may face, divided by the message's bound. With less, a message would not fit the noise's
# grid. With more, a message carries no information, and the account would count billions of them as free.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6


class Verdict(NamedTuple):
    """Why a request is refused: a word for the server, and a sentence for the party's own log."""

    reason: str
    exact: str


class Policy(BaseModel):
    """The rules of one party. All of them except the budget have cautious defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    unit: Literal["client", "record"] = "client"
    units: list[Literal["client", "record"]] | None = Field(default=None, min_length=1)
    record_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    relation: Literal["zero-out", "replace"] = "zero-out"
    least_sigma: float = Field(default=1.0, ge=LEAST_NOISE, le=MOST_NOISE, allow_inf_nan=False)
    largest_record_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    methods: list[str] = Field(default=["normec", "clip21", "dpsgd"], min_length=1)
    trusts: list[Literal["local", "secure-sum", "central"]] = Field(default=["local"], min_length=1)
    roster: str = "roster.toml"
    identity: str = "identity.pem"
    least_colluding: int = Field(default=1, ge=0)
    accept_loss: bool = False
    runs: list[str] = Field(default=["any"], min_length=1)
    largest_model: int = Field(default=10_000_000, ge=1)
    most_local_steps: int = Field(default=1000, ge=1)
    simulation: bool = False
    allow_without_noise: bool = False
    report_loss: bool = False
    witness: str | None = None

    def check(self, request: Request) -> Verdict | None:
        """Check the rules that do not depend on the ledger; None if the request may be answered."""
        terms, method = request.privacy, request.method
        if "any" not in self.runs and run_name(request.run) not in self.runs:
            return Verdict("terms", f"run {run_name(request.run)} is not among runs = {self.runs}")
        if len(request.x) > self.largest_model:
            return Verdict("terms", f"{len(request.x)} parameters are more than largest_model = {self.largest_model}")
        steps = request.plan.local.steps if request.plan.local is not None else 1
        if steps > self.most_local_steps:
            return Verdict("terms", f"{steps} local steps are more than most_local_steps = {self.most_local_steps}")
        if not any(allowed(name).covers(method, request.plan.local) for name in self.methods):
            if method.name in map(short_name, self.classes):
                return Verdict(
                    "terms",
                    f"method {method.name} with these parts and local steps is not among methods = {self.methods}",
                )
            return Verdict("terms", f"method {method.name} is not among methods = {self.methods}")
        if terms.noise not in NOISES:
            return Verdict("terms", f"noise {terms.noise} is not one of {', '.join(NOISES)}")
        if terms.noise == "none":
            if self.allow_without_noise:
                return None
            return Verdict("noise", "the run has no noise, and allow_without_noise = false")
        if self.epsilon is None:
            return Verdict("budget", "the policy has no epsilon, so nothing may be spent; state one to take part")
        if terms.noise == "seeded" and not self.simulation:
            return Verdict("noise", "seeded noise protects nobody, and simulation = false")
        if terms.trust not in self.trusts:
            return Verdict("terms", f"trust {terms.trust} is not among trusts = {self.trusts}")
        if terms.unit not in self.accepted_units:
            return Verdict("terms", f"unit {terms.unit} is not among units = {self.accepted_units}")
        if terms.relation != self.relation:
            return Verdict(
                "terms", f"the run protects by {terms.relation}, the party's account is kept for {self.relation}"
            )
        return self._check_record_clip(request) if terms.unit == "record" else None

    def check_collusion(self, colluding: int) -> Verdict | None:
        """Compare the number of parties that may collude with the server, by the terms of a secure sum."""
        if colluding < self.least_colluding:
            return Verdict(
                "terms",
                f"the sum allows {colluding} colluding parties, fewer than least_colluding = {self.least_colluding}",
            )
        return None

    def _check_record_clip(self, request: Request) -> Verdict | None:
        records, largest = request.plan.records, self.largest_record_clip
        if largest is None:
            return None
        if records is None:
            return Verdict("terms", f"the run does not clip records, and largest_record_clip = {largest:g}")
        bound = records.build().bound
        if bound > largest:
            return Verdict("terms", f"record_clip is {bound:g}, above largest_record_clip = {largest:g}")
        return None

    def check_noise(self, request: Request, release: Release) -> Verdict | None:
        """Compare the noise that an observer faces with `least_sigma` and `MOST_NOISE`.

        `release.gain` is the observer's noise over one client's: 1 under local trust, √n under central trust. The bound
        is that of a message with its weight in the sum. A run whose noise changes by round is refused in every round if
        its smallest noise is too small. At record level the least noise is in units of what one record can change, and
        it must also hide the rounding of the message.
        """
        terms = request.privacy
        bound = release.bound * release.heaviest
        faced = terms.sigma * release.gain / bound
        smallest = terms.sigma if terms.least_sigma is None else terms.least_sigma
        least, unit = smallest * release.gain / bound, "the bound"
        if terms.unit == "record":
            if smallest < least_noise(release, torch.tensor(request.x).dtype) or least < LEAST_NOISE:
                return Verdict("noise", f"sigma over the bound is {least:.6g}, too small beside the message's rounding")
            last = release.rounds - 1  # what a record can change only grows
            least, unit = float(release.multipliers(smallest, 1, last)[0]), "what a record can change"
        if least < self.least_sigma:
            return Verdict("noise", f"sigma over {unit} is {least:.6g}, below least_sigma = {self.least_sigma:g}")
        if faced > MOST_NOISE:
            return Verdict(
                "noise",
                f"sigma over the bound is {faced:.6g}, above {MOST_NOISE:g}: such messages carry no information",
            )
        return None

    @property
    def classes(self) -> list[str]:
        """The classes of `methods`, as the registry finds them."""
        return classes(self.methods)

    @property
    def accepted_units(self) -> list[str]:
        """What the runs that the party takes part in protect."""
        return list(self.units) if self.units is not None else [self.unit]

    @property
    def budgets(self) -> dict[str, float]:
        """The largest ε of each account that has a limit, by what it protects."""
        found: dict[str, float] = {self.unit: self.epsilon if self.epsilon is not None else math.inf}
        return found if self.record_epsilon is None else {**found, "record": self.record_epsilon}

    @property
    def stated_budgets(self) -> str:
        """The budgets as refusals state them: "8 per client, 1 per record"."""
        return ", ".join(f"{epsilon:g} per {unit}" for unit, epsilon in self.budgets.items())


def load_policy(path: str | Path) -> Policy:
    """Read a policy from a TOML file.

    Args:
        path: The file. Paths in it are relative to its folder.

    Returns:
        The policy, with paths that lead to these files from here.

    Raises:
        UsageError: The file has a mistake; the message names it in one line.
    """
    path = Path(path)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no policy {path}; a party needs its own rules to take part") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    known = Policy.model_fields
    for name in given:
        if name not in known:
            raise UsageError(
                f"{path}: there is no rule {name!r}{nearest(name, known)}; the rules are {', '.join(known)}"
            )
    try:
        policy = Policy.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{path}: {first_mistake(error)}") from None
    if policy.epsilon is None and not policy.allow_without_noise:
        raise UsageError(f"{path}: epsilon is missing; state the budget for all runs of this party together")
    if policy.unit == "record" and policy.record_epsilon is not None:
        raise UsageError(f"{path}: with unit = 'record', epsilon is the budget of every record; drop record_epsilon")
    files = {name: getattr(policy, name) for name in ("roster", "identity", "witness")}
    found = {name: str(path.parent / file) for name, file in files.items() if file is not None}
    policy = policy.model_copy(update={"methods": [_found(path, name) for name in policy.methods], **found})
    for known_by in (policy.methods, policy.classes):
        short = [short_name(name) for name in known_by]
        for name in short:
            if short.count(name) > 1:
                raise UsageError(f"{path}: methods: two have the name {name}; rename one of the classes")
    for run in policy.runs:
        if not NAME.fullmatch(run):
            raise UsageError(
                f"{path}: runs: {run!r} cannot be the name of a run; use letters, digits, dot, dash and underscore"
            )
    return policy


def _found(policy: Path, name: str) -> str:
    """The name of a method with the path of its file, which is relative to the policy. Raises if it does not exist."""
    file, colon, kind = name.rpartition(":")
    name = f"{policy.parent / file}:{kind}" if colon else name
    try:
        registry.find(allowed(name).kind)
    except UsageError as error:
        raise UsageError(f"{policy}: methods: {error}") from None
    return name
