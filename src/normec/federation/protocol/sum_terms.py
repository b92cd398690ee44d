"""The terms of a secure sum as both sides of a federation use them: made by the server, checked by every party.

`secure_sum.Terms` hold what the sum itself depends on. Their texts `method` and `plan` hold the rest as JSON: the
method with its settings, the privacy statement, and what a party computes. All parties sign the digest of all of it, so
the server cannot change a number between two rounds or between two parties.

A party trusts none of the numbers. It builds the method itself and therefore knows the bound; it computes the grid
again from public numbers; and it computes the privacy cost of a vector by the rules of `privacy`, with the noise of
n_min − c honest parties.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...algorithms.method import Method
from ...errors import UsageError, WireError
from ...privacy.facts import FULL, Facts, Sampling, Setting
from ...privacy.grid_account import honest_parties
from ...privacy.release import Release
from ...privacy.rules import release
from ...privacy.secure_sum import SumGrid
from ...privacy.statement import Privacy
from ..secure_sum.refusals import Refused
from ..secure_sum.roster import Roster
from ..secure_sum.terms import Terms, least_threshold
from .price import Price, facts_checked, releases_by_unit
from .terms import LocalTerms, MethodTerms, PlanTerms, PrivacyTerms, RecordTerms
from .wire import FLOATS, Array, Record, Request, from_fields, to_fields

FOLDER = "secure-sum"  # of the server's sums, in the folder of the run
PRIVACY = ("noise", "delta", "unit", "relation", "memory")  # of `PrivacyTerms`, in the plan


class SumPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a party computes, and what the account of its vectors depends on, as the terms hold it.

    `parameters` is the length of x and `broadcast` that of the numbers that the method sends with it. `divisors` are
    the public numbers of records, one for each party; None without a clip per record.
    """

    parameters: int
    broadcast: int
    dtype: str
    seed: int
    batch_size: int
    noise: str
    delta: float
    unit: str
    relation: str
    memory: str
    local: LocalTerms | None = None
    divisors: tuple[float, ...] | None = None
    clip: float | None = None
    by_layer: bool = False
    batch_rate: float | None = None

    @property
    def text(self) -> str:
        return json.dumps(msgspec.to_builtins(self), sort_keys=True)

    def records(self, number: int) -> RecordTerms | None:
        """How party `number` bounds what one record adds."""
        if self.divisors is None:
            return None
        return RecordTerms(self.divisors[number], self.by_layer, self.clip, self.batch_rate)


def setting_of(method: Method, terms: Terms, plan: SumPlan) -> Setting:
    """The run as the privacy rules see it: the same one as in a simulation with these settings."""
    return Setting(
        clients=terms.parties,
        rounds=terms.rounds,
        batch=Sampling(plan.batch_rate) if plan.batch_rate is not None else FULL,
        records=plan.divisors,
        dimension=method.message_length(plan.parameters),
        parameters=plan.parameters,
        local_steps=plan.local is not None,
        weights=_unequal(terms.weights),
    )


def grid_of(method: Method, terms: Terms) -> SumGrid:
    """The grid that follows from the terms and the bound of the method."""
    return SumGrid(terms.parties, method.bound, terms.sigma, _unequal(terms.weights))


def made_terms(
    run: str,
    roster: Roster,
    method: Method,
    plan: SumPlan,
    *,
    sigma: float,
    rounds: int,
    minimum: int,
    colluding: int,
    weights: tuple[float, ...],
) -> Terms:
    """The terms of a run, with the grid that follows from them.

    Raises:
        UsageError: A number is out of range, or the method's messages have no bound, so that they have no range.
    """
    parties = len(roster)
    grid = SumGrid(parties, method.bound, sigma, _unequal(weights))
    stated = MethodTerms.of(method)
    return Terms(
        run=run,
        roster=roster.digest.hex(),
        parties=parties,
        threshold=least_threshold(parties),
        minimum=minimum,
        colluding=colluding,
        sigma=sigma,
        step=grid.step,
        dimension=method.message_length(plan.parameters),
        rounds=rounds,
        weights=weights,
        method=json.dumps(dataclasses.asdict(stated), sort_keys=True),
        plan=plan.text,
        modulus_bits=grid.bits,
    )


@dataclass(frozen=True)
class Agreement:
    """Terms that party `number`, known to the server as `node`, has read and found consistent.

    Args:
        terms: The terms.
        plan: What they say in their text `plan`.
        stated: The method by name, as they say it.
        method: The method, built from the party's own code.
        grid: The grid of the vectors.
        number: The number of the party in the roster.
        node: The name under which the server asks it.
    """

    terms: Terms
    plan: SumPlan
    stated: MethodTerms
    method: Method
    grid: SumGrid
    number: int
    node: str

    @staticmethod
    def read(terms: Terms, number: int, node: str, methods: list[str], largest: int) -> Agreement:
        """Read terms at a party whose policy allows these `methods` and models of up to `largest` parameters.

        Raises `Refused` if the terms are not consistent, or name a larger model.
        """
        try:
            plan = msgspec.json.decode(terms.plan, type=SumPlan)
            stated = msgspec.json.decode(terms.method, type=MethodTerms)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused("terms", f"the method or the plan cannot be read: {str(error)[:200]}") from None
        if plan.parameters > largest:  # before a model of that size is made
            raise Refused("terms", f"{plan.parameters} parameters are more than largest_model = {largest}")
        try:
            method = stated.build(methods)
            agreement = Agreement(terms, plan, stated, method, grid_of(method, terms), number, node)
            agreement._check()
        except (UsageError, WireError) as error:
            raise Refused("terms", str(error)) from None
        return agreement

    def _check(self) -> None:
        """Raise `UsageError` if the numbers of the terms do not follow from each other."""
        terms, plan, grid = self.terms, self.plan, self.grid
        if (terms.step, terms.modulus_bits) != (grid.step, grid.bits):
            raise UsageError(
                f"the terms have a grid of step {terms.step:g} modulo 2^{terms.modulus_bits}, and {grid.step:g} modulo "
                f"2^{grid.bits} follows from them"
            )
        length = self.method.message_length(plan.parameters)
        if terms.dimension != length:
            raise UsageError(f"the terms have messages of {terms.dimension} numbers, {self.method.name} makes {length}")
        if (terms.sigma > 0) != (plan.noise == "secure") or plan.noise not in ("secure", "none"):
            raise UsageError(
                f"a secure sum has secure noise or none, got noise {plan.noise} with sigma {terms.sigma:g}"
            )
        if plan.dtype not in {known.name for known in FLOATS}:
            raise UsageError(f"x must be float32 or float64, got {plan.dtype}")
        if not 0 <= plan.broadcast <= plan.parameters + 2**16:
            raise UsageError(
                f"broadcast must be from 0 to {plan.parameters + 2**16} for this model, got {plan.broadcast}"
            )
        if plan.divisors is not None and len(plan.divisors) != terms.parties:
            raise UsageError(
                f"divisors must be one number for each of the {terms.parties} parties, got {len(plan.divisors)}"
            )
        zeros = np.zeros(plan.parameters, plan.dtype)
        _ = self.request(0, zeros, np.zeros(plan.broadcast, plan.dtype) if plan.broadcast else None)

    def request(self, round: int, x: Array, public: Array | None) -> Request:
        """What the party computes in a round, checked like a request of its own. Raises `WireError`."""
        terms, plan = self.terms, self.plan
        bound = float(self.method.bound)
        weights = _unequal(terms.weights)
        privacy: dict[str, Any] = {name: getattr(plan, name) for name in PRIVACY}
        made = Request(
            run=terms.run,
            node=self.node,
            round=round,
            index=self.number,
            parties=terms.parties,
            x=x,
            method=self.stated,
            privacy=PrivacyTerms(sigma=terms.sigma, bound=bound, trust="secure-sum", **privacy),
            plan=PlanTerms(
                seed=plan.seed,
                batch_size=plan.batch_size,
                rounds=terms.rounds,
                local=plan.local,
                heaviest=max(weights) if weights else None,
                records=plan.records(self.number),
            ),
            record=Record(),
            public=public,
        )
        found = from_fields(to_fields(made))
        if not isinstance(found, Request):
            raise WireError("not a request")
        return found

    def payload_request(self, round: int, payload: bytes) -> Request:
        """The request of a round whose x and public numbers are `payload`. Raises `WireError`."""
        plan = self.plan
        values = np.frombuffer(payload, plan.dtype) if not len(payload) % np.dtype(plan.dtype).itemsize else None
        if values is None or len(values) != plan.parameters + plan.broadcast:
            raise WireError(f"the payload must be {plan.parameters} + {plan.broadcast} numbers of {plan.dtype}")
        x, public = values[: plan.parameters], values[plan.parameters :]
        return self.request(round, x, public if plan.broadcast else None)

    def statement(self, delta: float) -> Privacy | None:
        """The statement for the party's own account, at its own `delta`; None for a run without noise."""
        plan, terms = self.plan, self.terms
        if plan.noise == "none":
            return None
        stated: Any = {name: getattr(plan, name) for name in PRIVACY if name != "delta"}
        records = plan.records(self.number)
        if records is not None:
            stated |= records.statement
        honest = honest_parties(terms.minimum, terms.colluding)
        return Privacy(sigma=terms.sigma, delta=delta, trust="secure-sum", honest=honest, **stated)

    def priced(self, round: int, delta: float) -> tuple[Price, Release] | None:
        """The privacy cost of a vector of this round, and the release of the run; None if the run has no noise.

        Raises:
            UsageError: No rule covers the terms.
        """
        stated = self.statement(delta)
        if stated is None:
            return None
        if self.plan.divisors is not None and self.plan.batch_size:
            raise UsageError("record_clip goes with full local gradients or batch_rate, not with batch_size")
        full = setting_of(self.method, self.terms, self.plan)
        plain = dataclasses.replace(full, records=None, batch=FULL)

        known: dict[bool, Facts] = {}

        def of(privacy: Privacy) -> Release:
            clipped = privacy.record_clip is not None
            if clipped not in known:
                known[clipped] = facts_checked(self.method, self.plan.parameters, clipped=clipped)
            return release(known[clipped], privacy, full if clipped else plain)

        found = releases_by_unit(stated, of)
        sigma, last = self.terms.sigma, self.terms.rounds - 1
        now = {unit: one.event(sigma, round) for unit, one in found.items()}
        most = {unit: one.event(sigma, last) for unit, one in found.items()}  # what a record can change only grows
        return Price(now, most), found[stated.unit]


def _unequal(weights: tuple[float, ...]) -> tuple[float, ...]:
    """The weights as grids and rules take them: none if all are 1."""
    return weights if any(weight != 1.0 for weight in weights) else ()
