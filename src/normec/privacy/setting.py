"""The facts about a method and a run that the rules need, without objects of higher packages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError, at_least, fraction, one_of, positive


class Refused(UsageError):  # noqa: N818  (a verdict, not a crash)
    """No valid rule is known for a statement; the message gives the reason and the cure."""


@dataclass(frozen=True)
class Facts:
    """The properties of a method on which privacy depends.

    `bound` is the supremum of the message's norm; it is infinite for identity, Top-k and Rand-k. `feedback` says
    whether the client keeps a memory g_i between rounds. `lipschitz` is the constant of Ψ if Ψ is the gradient of a
    convex function (SmoothedNorm: 1/alpha, Clip: 1, Identity: 1), and infinite otherwise. Only the record rules use it,
    with `beta` and `decay`, the step and the decay of the memory; leave it infinite for a client whose state is more
    than g_i (momentum, local steps). `made_of_messages` says whether the state is a function of the sent messages
    alone, so that with memory="noisy" it contains nothing that was not released.
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
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay must lie in [0, 1), got {self.decay}")


@dataclass(frozen=True)
class Sampling:
    """The sampling of a round: of the clients of a run, or of the records of a client's batch.

    `scheme` is "poisson" (each one with probability `rate`, independently) or "fixed" (a set of fixed size). `amplify`
    says whether the coins are secret and amplification is claimed. A claim that no rule allows is refused; with
    `amplify=False` every round counts as if the unit had taken part, which is always valid. `normaliser` is "fixed" if
    the sum is divided by a public number, and "count" if it is divided by the number that was drawn.
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

    `rounds` counts every round in which messages are sent, including warm-up rounds. `records` is the fixed, public
    number by which a client divides its sum of clipped records; with clients of several sizes, the smallest one.
    `dimension` is that of the message. `buffers` says whether the model shares un-noised statistics of the data
    (BatchNorm). `start` is "gradients" if the server's first estimate is computed from the clients' data without noise.
    """

    clients: int
    rounds: int
    sampling: Sampling = FULL
    batch: Sampling = FULL
    records: float | None = None
    dimension: int | None = None
    buffers: bool = False
    start: Literal["public", "gradients"] = "public"

    def __post_init__(self) -> None:
        at_least(1, clients=self.clients, rounds=self.rounds)
        one_of(("public", "gradients"), start=self.start)
        if self.records is not None:
            positive(records=self.records)
        if self.dimension is not None:
            at_least(1, dimension=self.dimension)
