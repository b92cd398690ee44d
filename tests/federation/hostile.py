"""A server that follows no rules: it writes its requests by hand and remembers what a party answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normec import Method, NormEC, Privacy
from normec.federation.protocol.party import Party
from normec.federation.protocol.terms import MethodTerms, PlanTerms, PrivacyTerms
from normec.federation.protocol.wire import Array, Fields, Record, Refusal, Reply, Request, to_fields

SIGMA = 10.0
METHOD = NormEC(0.1, 0.5)


@dataclass
class HostileServer:
    """`left`: the digests of all messages that left the party; `dropped`: the one that the next request drops."""

    party: Party
    x: Array
    run: str = "trial"
    number: str = "0" * 16
    node: str = "a"
    method: Method = METHOD
    privacy: Privacy | None = field(
        default_factory=lambda: Privacy(sigma=SIGMA, noise="secure", memory="noisy", trust="local")
    )
    sigma: float = SIGMA
    dropped: str = ""
    token: str = ""
    left: set[str] = field(default_factory=set)

    def fields(self, x: Array | None = None, **changes: Any) -> Fields:
        """A well-formed request of round 0, with no accepted message; `changes` are fields, with "__" for a dot."""
        request = Request(
            run=f"{self.run}~{self.number}",
            node=self.node,
            round=0,
            index=0,
            parties=3,
            x=self.x if x is None else x,
            method=MethodTerms.of(self.method),
            privacy=PrivacyTerms.of(self.privacy, self.sigma, self.method),
            plan=PlanTerms(seed=7, batch_size=0, rounds=1000),
            record=Record(dropped=self.dropped, token=self.token),
        )
        return to_fields(request) | {name.replace("__", "."): value for name, value in changes.items()}

    def send(self, table: Any) -> Reply | Refusal:
        answer = self.party.answer(table)
        if isinstance(answer, Reply):
            self.left.add(answer.digest)
            self.dropped = answer.digest  # so that the next question gets a message of its own
        elif answer.token:
            self.token = answer.token
        return answer

    def ask(self, x: Array | None = None, **changes: Any) -> Reply | Refusal:
        """The party's message at `x`, after the exchange that a party without a state begins with."""
        answer = self.send(self.fields(x, **changes))
        if isinstance(answer, Refusal) and answer.reason == "state":
            answer = self.send(self.fields(x, **changes))
        return answer


def zeros(dimension: int, dtype: Any = np.float64) -> Array:
    return np.zeros(dimension, dtype)
