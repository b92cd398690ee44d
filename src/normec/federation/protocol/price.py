"""The privacy cost of a party's message, for each unit that an account may protect.

A message has one noise and several guarantees. A party keeps an account for whole clients and one for single records
side by side, and a message is charged to both, whichever of the two its run protects:

| run | account "client" | account "record" |
| --- | --- | --- |
| unit = "client" | R1 or R2, by the policy's relation | R1: to change a record is to change the client's data, Δ = 2b |
| unit = "record", with a clip per record | R1 or R2: the bound b of the message holds as in any run | R4, S2 |
| unit = "record", without | R1 or R2 | R3, Δ = 2b |

(The rules are those of `privacy.rules`.) So no account is ever charged too little for a run of the other unit. A
client-level ε always covers records, if whole clients are replaced and not left out: a client that is absent sends a
message of length 0, which lies within b of every message, while two messages of a client with one record more or less
may be 2b apart. A record-level ε says nothing about the client, whose message is charged for its full bound.

The rule R4 with a memory that no noise covers (e_k > 0) needs the same terms in all rounds, and a server could change
them in a request. So a clip per record needs a state that consists of released messages: no state, or memory="noisy"
under local trust. The terms of a secure sum (`sum_terms`) are signed for all rounds, so the rule holds there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...algorithms.method import Method
from ...errors import UsageError
from ...privacy.accounting import Event
from ...privacy.facts import FULL, Facts, Sampling, Setting
from ...privacy.mechanism import facts_of, refuse_false_constant
from ...privacy.release import Release
from ...privacy.rules import release
from ...privacy.statement import Privacy
from .terms import PlanTerms, RecordTerms
from .wire import Request

UNITS = ("client", "record")
LEAST_PRECISION = 2.0**14  # how many times the rounding error of x's precision the noise must be, at record level


class Price(NamedTuple):
    """The privacy cost of a message in this round, and the largest cost of a message in any round of the run."""

    now: dict[str, Event]
    most: dict[str, Event]


def release_of(method: Method, privacy: Privacy, plan: PlanTerms, *, parties: int, dimension: int) -> Release:
    """What one party releases in a run: its own sensitivity with its own number of records, and the noise it faces.

    Server and party call it with the same terms. Raises `UsageError` if no rule covers them.
    """
    records = plan.records
    if records is not None:
        _check_records(method, privacy, plan, records, dimension)
    setting = Setting(
        clients=parties,
        rounds=plan.rounds,
        batch=Sampling(records.batch_rate) if records is not None and records.batch_rate is not None else FULL,
        records=records.divisor if records is not None else None,
        dimension=method.message_length(dimension),
        parameters=dimension,
        local_steps=plan.local is not None,
        weights=(plan.heaviest,) if plan.heaviest is not None else (),
    )
    return release(facts_checked(method, dimension, clipped=records is not None), privacy, setting)


def facts_checked(method: Method, dimension: int, *, clipped: bool) -> Facts:
    """What the rules know of a method. If records are `clipped`, its constant is tried out on synthetic gradients."""
    facts = facts_of(method, dimension)
    if clipped:
        refuse_false_constant(method, facts.lipschitz, dimension)
    return facts


def releases_by_unit(stated: Privacy, release_for: Callable[[Privacy], Release]) -> dict[str, Release]:
    """The release of a run as each account counts it, by the table above; `release_for` applies the rules."""
    own = release_for(stated)
    client = dataclasses.replace(stated, unit="client", record_clip=None, record_clip_by="record")
    if stated.unit == "client":
        return {"client": own, "record": release_for(dataclasses.replace(client, relation="replace"))}
    return {"client": release_for(client), "record": own}


def _check_records(method: Method, privacy: Privacy, plan: PlanTerms, records: RecordTerms, dimension: int) -> None:
    if privacy.trust != "local":
        raise UsageError(f"record_clip needs trust='local' in a federation, got trust={privacy.trust!r}")
    if plan.batch_size:
        raise UsageError("record_clip goes with full local gradients or batch_rate, not with batch_size")
    if privacy.memory != "noisy" and facts_of(method, dimension).feedback:
        raise UsageError(
            "record_clip needs memory='noisy' in a federation: a clean memory adds up what one record did to all "
            "messages so far, and the server could change the terms on the way"
        )
    records.build()


def priced(request: Request, method: Method, delta: float) -> tuple[Price, Release] | None:
    """The price of a message for both accounts, and the release that the run states; None if the run has no noise.

    Raises `UsageError` if no rule covers the terms, or if they claim another bound than that of the method.
    """
    terms = request.privacy
    stated = terms.build(delta, request.plan.records)
    if stated is None:
        return None
    if terms.bound != method.bound:
        raise UsageError(f"the request claims a bound of {terms.bound:g}, it is {method.bound:g}")
    parties, dimension, plain = request.parties, len(request.x), dataclasses.replace(request.plan, records=None)

    def release_for(privacy: Privacy) -> Release:
        plan = request.plan if privacy.record_clip is not None else plain
        return release_of(method, privacy, plan, parties=parties, dimension=dimension)

    by_unit = releases_by_unit(stated, release_for)
    now = {unit: found.event(terms.sigma) for unit, found in by_unit.items()}
    least = terms.least_sigma
    most = now if least is None else {unit: found.event(least) for unit, found in by_unit.items()}
    return Price(now, most), by_unit[stated.unit]


def least_noise(release: Release, dtype: torch.dtype) -> float:
    """The smallest σ at record level at which the rounding of messages in `dtype` is negligible beside the noise."""
    return release.bound * LEAST_PRECISION * torch.finfo(dtype).eps
