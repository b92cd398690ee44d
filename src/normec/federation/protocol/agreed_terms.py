"""The terms of a run as one party agreed to them; a request that differs from them is refused.

A policy says what a party accepts of any run. Agreed terms say what this run is: the method with its settings, the
noise, the plan, the number of parties and the place of this party among them. With them a server cannot change
anything on which the result or the privacy depends from one request to the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np

from ...algorithms.method import Method
from ...errors import UsageError, WireError
from ...privacy.accounting import epsilon_of
from ...privacy.noise_schedule import LEVELS
from .policy import Verdict
from .price import release_of
from .terms import MethodTerms, PlanTerms, PrivacyTerms
from .wire import FLOATS, LARGEST, LIMITS, Record, Request, from_fields, run_name, to_fields


@dataclass(frozen=True)
class AgreedTerms:
    """What every request of a run to one party must state.

    `sigmas` is the noise of each round if it changes by round, and empty otherwise. `parameters` is the size of the
    model.
    """

    run: str
    node: str
    index: int
    parties: int
    parameters: int
    dtype: str
    method: MethodTerms
    privacy: PrivacyTerms
    plan: PlanTerms
    sigmas: tuple[float, ...] = ()

    @classmethod
    def of(cls, request: Request, sigmas: tuple[float, ...] = ()) -> Self:
        """The terms of a run from its first request, and the noise of each round if it changes."""
        return cls(
            run_name(request.run),
            request.node,
            request.index,
            request.parties,
            len(request.x),
            str(request.x.dtype),
            request.method,
            request.privacy,
            request.plan,
            sigmas,
        )

    def check(self, request: Request) -> Verdict | None:
        """Compare a request with the terms; None if it keeps them."""
        sigma = self.sigmas[request.round] if request.round < len(self.sigmas) else self.privacy.sigma
        wanted = dataclasses.replace(self, privacy=dataclasses.replace(self.privacy, sigma=sigma), sigmas=())
        stated = AgreedTerms.of(request)
        for field in dataclasses.fields(self):
            agreed, asked = getattr(wanted, field.name), getattr(stated, field.name)
            if agreed != asked:
                name, agreed, asked = _difference(field.name, agreed, asked)
                order = "; parties must be registered in the order of the terms" if name == "index" else ""
                return Verdict("terms", f"the request has {name} = {asked!r}, the agreed terms have {agreed!r}{order}")
        return None

    def differs_from(self, other: Self) -> str | None:
        """Where the terms of another party of the run differ, except in its name, its place, its noise and its divisor.

        Returns the entry and both values, in words; None if all else is the same.
        """
        own, records = other.privacy, self.plan.records
        if records is not None and other.plan.records is not None:
            records = dataclasses.replace(records, divisor=other.plan.records.divisor)
        wanted = dataclasses.replace(
            self,
            node=other.node,
            index=other.index,
            privacy=dataclasses.replace(self.privacy, sigma=own.sigma, least_sigma=own.least_sigma),
            plan=dataclasses.replace(self.plan, records=records),
            sigmas=other.sigmas,
        )
        if wanted == other:
            return None
        name, mine, theirs = _difference("terms", wanted, other)
        return f"{name.removeprefix('terms.')} is {mine!r} and {theirs!r}"

    def epsilon(self, method: Method) -> float | None:
        """The ε of one message in every round, for what the run protects and at the δ of the terms; None without noise.

        Args:
            method: The method of the terms, as this machine builds it.

        Raises:
            UsageError: No rule covers the terms, or they state another bound than that of the method.
        """
        privacy, delta = self.privacy, self.privacy.delta
        stated = privacy.build(delta, self.plan.records)
        if stated is None:
            return None
        if privacy.bound != method.bound:
            raise UsageError(f"the terms state a bound of {privacy.bound:g}, it is {method.bound:g}")
        release = release_of(method, stated, self.plan, parties=self.parties, dimension=self.parameters)
        rounds = Counter(self.sigmas) if self.sigmas else {privacy.sigma: self.plan.rounds}
        if release.rate < 1 and len(rounds) > LEVELS:
            raise UsageError(f"a run with drawn records has at most {LEVELS} different noises, got {len(rounds)}")
        events = [dataclasses.replace(release.event(sigma), count=count) for sigma, count in rounds.items()]
        return epsilon_of(events, delta)

    def first_request(self) -> Request:
        """A request as the terms state it, at a model of zeros, from which a policy and an account can be checked."""
        x = np.zeros(self.parameters, np.dtype(self.dtype))
        record = Record(0, 0, "", "", 0, "", None)
        return Request(
            f"{self.run}~{0:016x}",
            self.node,
            0,
            self.index,
            self.parties,
            x,
            self.method,
            self.privacy,
            self.plan,
            record,
        )

    def to_facts(self) -> dict[str, Any]:
        """The terms in plain types, for JSON."""
        return {**dataclasses.asdict(self), "sigmas": list(self.sigmas)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_facts` returns. Raises `UsageError` if it is something else."""
        try:
            found = msgspec.convert(facts, type=cls)
            if found.to_facts() != facts:
                raise WireError("it has entries that no terms have")
            if not 1 <= found.parameters <= LARGEST or found.dtype not in {known.name for known in FLOATS}:
                raise WireError(f"a model has 1 to {LARGEST} parameters in float32 or float64")
            if found.privacy.trust == "secure-sum":
                raise WireError("they are for single messages, and their trust is secure-sum, which allows none")
            least, most = found.privacy.least_sigma, LIMITS["privacy.sigma"][1]
            if (least is None) != (not found.sigmas) or len(found.sigmas) not in (0, found.plan.rounds):
                raise WireError("noise that changes by round needs a number for each round, and the smallest of them")
            if not all(least <= sigma <= most for sigma in found.sigmas if least is not None):
                raise WireError(f"the noise of a round must lie between the smallest of the run and {most:g}")
            _ = from_fields(to_fields(dataclasses.replace(found, parameters=1).first_request()))
        except (msgspec.ValidationError, WireError, TypeError) as error:
            raise UsageError(f"the terms of a party cannot be read: {error}") from None
        return found


def _difference(name: str, agreed: Any, asked: Any) -> tuple[str, Any, Any]:
    """The name and both values of the innermost entry that differs."""
    if dataclasses.is_dataclass(agreed) and dataclasses.is_dataclass(asked):
        for field in dataclasses.fields(agreed):
            mine, theirs = getattr(agreed, field.name), getattr(asked, field.name)
            if mine != theirs:
                return _difference(f"{name}.{field.name}", mine, theirs)
    return name, agreed, asked
