"""The noise of an optimizer's messages: drawn on the rank before anything leaves it, paid for by rank 0."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..independence import refuse_mixing_methods
from ..methods import Method, identity_of
from ..paying import Payments
from ..privacy.ledger import BudgetSpent
from ..privacy.mechanism import Mechanism, Spent
from ..privacy.setting import Setting
from ..privacy.statement import Privacy
from ..world import World

UNSEEN = (
    "the model's buffers, which the optimizer does not see: statistics of a BatchNorm layer are not covered",
    "how the loss was computed: the guarantee is for whole clients, whatever their batches",
)


class Noise:
    """A `Mechanism` for a training loop of the user's own."""

    def __init__(
        self,
        privacy: Privacy,
        method: Method,
        clients: int,
        dimension: int,
        rounds: int | None,
        seed: int,
        world: World,
        ledger: str | Path | None,
    ) -> None:
        if rounds is None:
            raise UsageError("privacy needs rounds, the number of steps that the noise must last for")
        if privacy.unit != "client" or privacy.sampling is not None:
            raise UsageError("the optimizer protects whole clients, all of which take part: unit='client', no sampling")
        privacy = privacy.with_noise("secure")
        public = {"method": identity_of(method), "privacy": privacy.to_dict(), "rounds": rounds, "clients": clients}
        public |= {"dimension": dimension, "seed": seed}
        name = hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16]
        self._mechanism = Mechanism(privacy, method, Setting(clients, rounds, dimension=dimension), seed, name, UNSEEN)
        refuse_mixing_methods(method, dimension)
        self._world, self._rounds, self._clients = world, rounds, clients
        self._payments = Payments(self._mechanism, world, {})
        self._ledger = Path(ledger) if ledger is not None and world.rank == 0 else None
        self._head: list[Any] | None = None
        self._opened = False

    @property
    def on_grid(self) -> bool:
        """Whether sums travel as whole numbers."""
        return self._mechanism.privacy.noise != "seeded" and self._mechanism.privacy.trust != "local"

    @property
    def head(self) -> list[Any] | None:
        return self._mechanism.head

    def expect(self, head: list[Any] | None) -> None:
        """The ledger as a saved state knew it; one that knows less is refused."""
        self._head = head

    def pay(self, round: int) -> None:
        """Raises `BudgetSpent` on every rank."""
        if round >= self._rounds:
            raise UsageError(f"the noise was calibrated for {self._rounds} rounds; plan more of them from the start")
        if not self._opened:
            self._world.first(self._open)
            self._opened = True
        refused = self._payments.pay(round)
        if refused is not None:
            raise BudgetSpent.said(round, refused)

    def _open(self) -> None:
        if self._ledger is not None:
            self._ledger.parent.mkdir(parents=True, exist_ok=True)
            self._mechanism.open(self._ledger, self._head)

    def outgoing(self, messages: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """(what leaves this rank, what the memories take)."""
        kept = self._mechanism.send(messages, clients)
        return self._mechanism.outgoing(torch.zeros_like(messages[0]), len(clients) / self._clients), kept

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        return self._mechanism.received(whole, like)

    def spent(self) -> Spent:
        """Collective."""
        return self._payments.spent()
