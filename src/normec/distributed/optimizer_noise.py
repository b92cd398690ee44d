"""The noise of an optimizer's messages: drawn on the rank before anything leaves it, paid for by rank 0.

Every release is paid for, however often its round is repeated, and has noise of its own: the user's loop computes the
gradients, so nobody can vouch that a repeated round sends the same message.

Noise that protects somebody needs a ledger. A simulation (seeded noise) may keep its account in `state_dict` instead:
for each optimizer that has paid for releases of this training, how many, and at which noise multiplier. Of two accounts
that are brought together, the larger number counts for each optimizer, so that going back to an older state takes
nothing back. All optimizers of one training in one process have one account.

Seeded noise comes from a secret of this optimizer alone, unless a seed is given. Then it is named by the seed, by
everything public, by where the training began (x and its step sizes), by the round, and by how often that round was
released: two trainings that differ in any of these share no noise, and two that are alike in all repeat each other's.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.method import Method
from ..algorithms.registry import identity_of
from ..errors import UsageError
from ..privacy.accounting import Event
from ..privacy.mechanism import Mechanism, Spent
from ..privacy.setting import Setting
from ..privacy.statement import Privacy
from ..training.budget import Budget
from ..training.communicator import Communicator, check_agreement
from ..training.independence import refuse_mixing_methods

NOTES = ("the guarantee is for whole clients, however their losses and batches are made",)
GAPS = (
    "gradients that a loop of one's own has added up over clients or ranks before the optimizer takes them",
    "the model's buffers, which the optimizer does not see: statistics of a BatchNorm layer",
    "what a rank prints or saves, and that it fails or ends: other ranks notice its absence",
)
REPEATED = (
    "other trainings of the same seed, start and settings: their noise is the same, so that differences show data"
)
FORGETFUL = "releases made after the state that a new process goes on from: without ledger= nothing remembers them"
Account = dict[str, tuple[float, int]]  # an optimizer's random name → noise multiplier, releases
_accounts: dict[str, Account] = {}  # of this process: an optimizer's random name → the account of its training


class OptimizerNoise:
    """A `Mechanism` for a training loop of the user's own."""

    def __init__(
        self,
        privacy: Privacy,
        method: Method,
        clients: int,
        dimension: int,
        rounds: int | None,
        seed: int | None,
        communicator: Communicator,
        ledger: str | Path | None,
        start: str,
        weights: tuple[float, ...] = (),
    ) -> None:
        """Refuse what no rule covers; `start`: where the training begins, as a checksum that all ranks know.

        `weights`: n·w_i of all clients; empty for equal weights.
        """
        if rounds is None:
            raise UsageError("privacy needs rounds, the number of steps that the noise must last for")
        if privacy.unit != "client" or privacy.sampling is not None:
            raise UsageError("the optimizer protects whole clients, all of which take part: unit='client', no sampling")
        refuse_mixing_methods(method, dimension)
        privacy = privacy.with_noise("secure")
        if ledger is None and privacy.noise != "seeded":
            raise UsageError(
                f"noise={privacy.noise!r} needs ledger=, a file on rank 0 that remembers every release; "
                "for a simulation without one choose noise='seeded'"
            )
        public = {"method": identity_of(method), "privacy": privacy.to_dict(), "rounds": rounds, "clients": clients}
        self._public, self._start = public | {"dimension": dimension, "seed": seed}, start
        if weights:
            self._public["weights"] = weights
        setting = Setting(clients, rounds, dimension=dimension, weights=weights)
        gaps = GAPS if ledger is not None else (*GAPS, FORGETFUL)
        if seed is not None and privacy.noise == "seeded":
            gaps = (*gaps, REPEATED)
        source = seed if seed is not None else communicator.on_rank_zero(lambda: secrets.randbits(128))
        self._mechanism = mechanism = Mechanism(privacy, method, setting, source, self._name(), NOTES, gaps)
        self._communicator, self._rounds, self._clients = communicator, rounds, clients
        self._budget = Budget(mechanism, communicator, {})
        self._ledger = Path(ledger) if ledger is not None else None
        self._own = communicator.on_rank_zero(lambda: secrets.token_hex(8))
        self._multiplier = mechanism.release.event(mechanism.sigma).multiplier
        _accounts[self._own] = {self._own: (self._multiplier, 0)}
        communicator.on_rank_zero(self._open)
        self.close = weakref.finalize(self, mechanism.close)

    @property
    def on_grid(self) -> bool:
        """Whether sums travel as whole numbers."""
        return self._mechanism.privacy.noise != "seeded" and self._mechanism.privacy.trust != "local"

    def _open(self) -> None:
        if self._ledger is not None:
            self._ledger.parent.mkdir(parents=True, exist_ok=True)
            self._mechanism.open(self._ledger)

    def _name(self) -> str:
        """The first part of the name of all noise of this training."""
        return hashlib.sha256(json.dumps([self._public, self._start], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def bound(self) -> float:
        """The norm of a message that the noise was calibrated for."""
        return self._mechanism.release.bound

    @property
    def _account(self) -> Account:
        return _accounts[self._own]

    def state(self) -> dict[str, Any]:
        """What a saved state must know: the start, and the ledger as it is now, or the account and its statement."""
        if self._ledger is not None:
            return {"start": self._start, "ledger": self._mechanism.head}
        account = {name: list(paid) for name, paid in self._account.items()}
        return {"start": self._start, "statement": self._mechanism.privacy.to_dict(), "account": account}

    def load(self, held: dict[str, Any]) -> None:
        """Bring the account of a saved state together with this one, and go on with its noise. Collective."""
        check_agreement(
            self._communicator, {"start of the state's training": held["start"]}, "load states that were saved together"
        )
        self._start = held["start"]
        self._mechanism.name = self._name()
        if self._ledger is not None:
            self._communicator.on_rank_zero(lambda: self._mechanism.recognise(held["ledger"]))
            return
        saved = self._communicator.all_gather(held["account"])
        known = [_accounts[name] for account in saved for name in account if name in _accounts]
        together = _together([self._account, *saved, *known])
        _accounts.update(dict.fromkeys(together, together))

    def unlike(self, held: dict[str, Any]) -> str | None:
        """Why this optimizer cannot go on from a saved state with the account `held`, or None."""
        if self._ledger is None and "account" not in held:
            return "its releases are in a ledger; pass the same ledger= here"
        if self._ledger is not None and "ledger" not in held:
            return "its releases are in no ledger; go on without ledger=, or start anew"
        if self._ledger is not None:
            return None  # the ledger itself was opened for this statement
        for name, value in self._mechanism.privacy.to_dict().items():
            before = held["statement"].get(name)
            if before != value:
                return f"{name} is {before!r} in the state, {value!r} here; keep the statement, or start anew"
        return None

    def pay(self, round: int) -> None:
        """Pay for one more release, of `round`; raises `BudgetSpent` on every rank. Collective."""
        if round >= self._rounds:
            raise UsageError(f"the noise was calibrated for {self._rounds} rounds; plan more of them from the start")
        self._take_account()
        self._budget.begin()
        self._budget.pay(round)
        self._account[self._own] = self._multiplier, self._account[self._own][1] + 1

    def _take_account(self) -> None:
        """Take what was paid for so far, which another optimizer of this training may have done."""
        if self._ledger is None:
            self._mechanism.take_account(Event(z, count=count) for z, count in self._account.values() if count)

    def outgoing(self, messages: Tensor, clients: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what leaves this rank, what the memories take); `weights`: n·w_i of these clients, unless all are equal."""
        kept = self._mechanism.send(messages, clients, weights)
        return self._mechanism.outgoing(torch.zeros_like(messages[0]), len(clients) / self._clients), kept

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        return self._mechanism.received(whole, like)

    def spent(self) -> Spent:
        """The exact account. Collective."""
        self._take_account()
        return self._budget.spent()


def _together(accounts: Iterable[Mapping[str, Sequence[Any]]]) -> Account:
    """One account of all, with the larger number of releases for each optimizer."""
    together: Account = {}
    for account in accounts:
        for name, (multiplier, releases) in account.items():
            together[name] = multiplier, max(releases, together.get(name, (multiplier, 0))[1])
    return together
