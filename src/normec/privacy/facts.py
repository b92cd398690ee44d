"""The facts about a method and a run that the rules need, without objects of higher packages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError, at_least, below_one, fraction, one_of, positive


class Refused(UsageError):  # noqa: N818  (a verdict, not a crash)
    """No valid rule is known for a statement; the message gives the reason and the cure."""


@dataclass(frozen=True)
class Facts:
    """The properties of a method on which privacy depends.

    Args:
        name: The method's name, for messages.
        bound: The largest norm of a message; infinite for identity, Top-k and Rand-k.
        feedback: Whether the client keeps a memory g_i between rounds.
        lipschitz: The Lipschitz constant of Ψ if Ψ is the gradient of a convex function (SmoothedNorm: 1/alpha, Clip:
            1, Identity: 1), and otherwise infinite. Only the record rules use it. Leave it infinite for a client whose
            state is more than g_i (momentum, local steps).
        beta: The step of the memory, for the record rules.
        decay: The forgetting of the memory, for the record rules.
        made_of_messages: Whether the state is a function of the messages that were sent and of nothing else, so that
            with memory="noisy" it holds nothing that was not released.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> Facts("normec", bound=1.0, feedback=True, lipschitz=100.0, beta=0.1).decay
        0.0
    """

    name: str
    bound: float
    feedback: bool
    lipschitz: float = math.inf
    beta: float = 1.0
    decay: float = 0.0
    made_of_messages: bool = True

    def __post_init__(self) -> None:
        for name in ("bound", "lipschitz"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be > 0, got {getattr(self, name)}")
        positive(beta=self.beta)
        below_one(decay=self.decay)


@dataclass(frozen=True)
class Sampling:
    """The sampling of a round: of the clients of a run, or of the records of a client's batch.

    Args:
        rate: The share that takes part.
        scheme: "poisson" (each one with probability `rate`) or "fixed" (a set of fixed size).
        amplify: Whether who takes part is kept secret and the gain is claimed. If no rule allows it, the claim is
            refused. With False every round counts as if the unit had taken part, which is always valid.
        normaliser: "fixed" if the sum is divided by a public number, "count" if it is divided by how many were drawn.

    Raises:
        UsageError: A value is unknown or out of range.

    Example:
        >>> Sampling(0.1).claims, Sampling(0.1, amplify=False).claims
        (True, False)
    """

    rate: float = 1.0
    scheme: Literal["poisson", "fixed"] = "poisson"
    amplify: bool = True
    normaliser: Literal["fixed", "count"] = "fixed"

    def __post_init__(self) -> None:
        fraction(rate=self.rate)
        one_of(("poisson", "fixed"), scheme=self.scheme)
        one_of(("fixed", "count"), normaliser=self.normaliser)

    @property
    def claims(self) -> bool:
        """Whether amplification by sampling is claimed."""
        return self.rate < 1 and self.amplify


FULL = Sampling()


@dataclass(frozen=True)
class Setting:
    """The properties of a run on which privacy depends.

    Args:
        clients: The number of clients.
        rounds: The number of rounds in which messages are sent, warm-up rounds included.
        sampling: Which clients take part in a round.
        batch: Which records of a client are part of its batch.
        records: The fixed, public number by which a client divides its sum of clipped records: one for all clients
            (where they differ, the smallest), or one for each.
        all_records: The public number of the records of all clients together; None if it is not known.
        dimension: The dimension of a message.
        parameters: The number of the model's parameters, if a message has another dimension.
        buffers: Whether the model shares statistics of the data without noise (BatchNorm).
        start: "gradients" if the server's first estimate is computed from the clients' data without noise, and
            otherwise "public".
        local_steps: Whether a client's update comes from several steps on its own data instead of one gradient.
        weights: The public numbers n·w_i by which the server multiplies the clients' messages: one for each client, or
            the largest alone; empty for equal weights.
        message_weights: The weight of each round's message in the last model (`algorithms.message_weights`), for
            noise_schedule="best"; None if it is not known.
        groups: The number of public groups of clients that take turns, one in each round; 1 if any client may take part
            in any round.
        workload: How much of a message is in the iterate of its round and in each later one
            (`algorithms.message_weights.iterate_weights`), for noise_bands; empty if it is not known.

    Raises:
        UsageError: A value is unknown or out of range.

    Example:
        >>> Setting(clients=100, rounds=300).sampling.rate
        1.0
        >>> Setting(clients=2, rounds=300, weights=(1.5, 0.5)).heaviest
        1.5
    """

    clients: int
    rounds: int
    sampling: Sampling = FULL
    batch: Sampling = FULL
    records: float | tuple[float, ...] | None = None
    all_records: float | None = None
    dimension: int | None = None
    parameters: int | None = None
    buffers: bool = False
    start: Literal["public", "gradients"] = "public"
    local_steps: bool = False
    weights: tuple[float, ...] = ()
    message_weights: tuple[float, ...] | None = None
    groups: int = 1
    workload: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, clients=self.clients, rounds=self.rounds, groups=self.groups)
        one_of(("public", "gradients"), start=self.start)
        for name, given in (("weights", self.weights), ("records", self.divisors)):
            if len(given) not in (0, 1, self.clients):
                raise UsageError(
                    f"{name} must be one number, or one for each of {self.clients} clients, got {len(given)}"
                )
            for one in given:
                positive(**{name: one})
        if self.dimension is not None:
            at_least(1, dimension=self.dimension)

    @property
    def heaviest(self) -> float:
        """The largest weight n·w_i; 1 for equal weights."""
        return max(self.weights, default=1.0)

    @property
    def turns(self) -> int:
        """The most rounds in which one client takes part."""
        return -(-self.rounds // self.groups)

    @property
    def divisors(self) -> tuple[float, ...]:
        """`records` as a table: empty, one number for all clients, or one for each."""
        if self.records is None:
            return ()
        return self.records if isinstance(self.records, tuple) else (self.records,)
