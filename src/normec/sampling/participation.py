"""The clients that take part in a round, as a function of the seed and the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, at_least, fraction
from .random_streams import Stream, coins_below, derive_seed, own_numbers


class Participation(Protocol):
    """The interface of participation rules: which of n clients send a message in a round."""

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:
        """Return sorted client numbers, or None for all clients."""
        ...


@dataclass(frozen=True)
class Everyone:
    """Full participation, as in the paper.

    Example:
        >>> Everyone().draw(clients=3, round=0, seed=0) is None  # None means all clients
        True
    """

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each client takes part with probability `rate`, independently. It amplifies privacy.

    Args:
        rate: The probability, in (0, 1].

    Raises:
        UsageError: `rate` does not lie in (0, 1].

    Example:
        >>> len(Poisson(1.0).draw(clients=5, round=0, seed=0))
        5
    """

    rate: float

    def __post_init__(self) -> None:
        fraction(rate=self.rate)

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:
        coins = Stream(seed, "participation").of_all(round, clients)
        return (coins >> 10 < coins_below(self.rate)).nonzero()[:, 0]


@dataclass(frozen=True)
class FixedSize:
    """Exactly `count` clients, uniformly without replacement.

    Args:
        count: How many clients take part in a round.

    Raises:
        UsageError: `count` is not a whole number of at least 1.

    Example:
        >>> len(FixedSize(2).draw(clients=5, round=0, seed=0))
        2
    """

    count: int

    def __post_init__(self) -> None:
        at_least(1, count=self.count)

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:
        if self.count > clients:
            raise UsageError(f"cannot draw {self.count} of {clients} clients; ask for at most {clients}")
        if self.count == clients:
            return torch.arange(clients)
        keys = Stream(seed, "participation").of_all(round, clients).numpy()
        largest = np.partition(keys, self.count - 1)[self.count - 1]
        return torch.from_numpy(np.flatnonzero(keys <= largest)[: self.count])


@dataclass(frozen=True)
class Rotation:
    """Groups of clients that take turns: round k belongs to group k mod `groups`, and client i to group i mod `groups`.

    In a round of its group a client takes part, or with `rate` < 1 takes part with that probability, independently. So
    two rounds of a client are a multiple of `groups` apart, and in T rounds it sends at most ⌈T / groups⌉ messages. The
    groups are public.

    Args:
        groups: The number of groups; at most the number of clients.
        rate: The probability with which a client takes part in a round of its group, in (0, 1].

    Raises:
        UsageError: `groups` is not a whole number of at least 1, or `rate` does not lie in (0, 1].

    Example:
        >>> [Rotation(groups=3).draw(clients=5, round=k, seed=0).tolist() for k in range(4)]
        [[0, 3], [1, 4], [2], [0, 3]]
    """

    groups: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, groups=self.groups)
        object.__setattr__(self, "groups", int(self.groups))  # NumPy's numbers become Python's, for files
        fraction(rate=self.rate)

    def draw(self, clients: int, round: int, seed: int) -> Tensor | None:
        if self.groups > clients:
            raise UsageError(f"groups = {self.groups} is more than the {clients} clients; ask for at most {clients}")
        turn = torch.arange(round % self.groups, clients, self.groups)
        if self.rate == 1:
            return turn
        drawn = Poisson(self.rate).draw(clients, round, seed)
        return drawn if drawn is None else drawn[drawn % self.groups == round % self.groups]

    def expected_messages(self, clients: int, rounds: int) -> float:
        """The expected number of messages in the first `rounds` rounds.

        Example:
            >>> Rotation(groups=3, rate=0.5).expected_messages(clients=5, rounds=4)  # groups of 2, 2 and 1 clients
            3.5
        """
        cycles, rest = divmod(rounds, self.groups)
        return self.rate * (cycles * clients + sum(-(-(clients - group) // self.groups) for group in range(rest)))


def drawn_clients(participation: Participation, clients: int, round: int, seed: int) -> Tensor | None:
    """Return the clients that take part in a round: increasing numbers on the host, or None for all of them.

    Raises:
        UsageError: The rule drew a client twice, out of order, or one that does not exist.
    """
    if known_participation(participation):
        return participation.draw(clients, round, seed)
    with own_numbers(derive_seed(seed, "participation rule", round), often=True):
        drawn = participation.draw(clients, round, seed)
    if drawn is None:
        return drawn
    whole = isinstance(drawn, Tensor) and drawn.ndim == 1 and drawn.dtype == torch.int64
    if not whole or (
        len(drawn) and not (int(drawn[0]) >= 0 and int(drawn[-1]) < clients and bool((drawn.diff() > 0).all()))
    ):
        shown = drawn.tolist() if isinstance(drawn, Tensor) else drawn
        raise UsageError(
            f"participation must draw increasing client numbers from 0 to {clients - 1}, each at most once, as a "
            f"tensor of int64; in round {round} it drew {str(shown)[:80]}"
        )
    return drawn.cpu()


def steady_count(participation: Participation, clients: int) -> int | None:
    """Return how many clients take part in every round, or None if their number varies or is not known.

    Example:
        >>> [steady_count(rule, 6) for rule in (Everyone(), FixedSize(2), Rotation(3), Rotation(4), Poisson(0.5))]
        [6, 2, 2, None, None]
    """
    if isinstance(participation, Rotation):
        steady = participation.rate == 1 and clients % participation.groups == 0
        return clients // participation.groups if steady else None
    if isinstance(participation, FixedSize):
        return participation.count
    return clients if isinstance(participation, Everyone) else None


def known_participation(participation: Participation) -> bool:
    """Whether the rule belongs to this library; such rules draw no client twice and use no data."""
    return type(participation) in (Everyone, Poisson, FixedSize, Rotation)
