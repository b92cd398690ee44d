"""The noise of an optimizer's messages: each rank adds it before it sends, and rank 0 pays for it.

Every release is paid for and has its own noise, however often its round is repeated: the user's loop computes the
gradients, so a repeated round may send another message.

Noise that protects anyone needs a ledger. A simulation (seeded noise) may keep its account in `state_dict` instead. The
account lists, for each optimizer that has paid for releases of this training, their number and their noise multiplier.
When two accounts are merged, the larger number counts for each optimizer, so that going back to an older state refunds
nothing. All optimizers of one training in one process share one account.

Seeded noise comes from a secret of this optimizer, unless a seed is given. With a seed, the noise depends on the seed,
on all public settings, on the start of the training (x and its step sizes), on the round, and on how often this round
was released. Two trainings that differ in any of these share no noise; two that agree in all of them have the same
noise.
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
from ..privacy.facts import Setting
from ..privacy.mechanism import Mechanism, Spent
from ..privacy.statement import Privacy
from ..training.budget import Budget
from ..training.communicator import Communicator, check_agreement
from ..training.independence import refuse_mixing_methods

NOTES = ("the guarantee protects whole clients, whatever their losses and batches are",)
GAPS = (
    "gradients that the training loop has added up over clients or ranks, or exchanged between clients, before the "
    "optimizer reads them, or of parameters that the optimizer does not have",
    "what the training loop, the model or the loss keeps of one client and uses for another one's gradient",
    "random numbers of a known seed that the training loop draws for single clients outside their turns, or from a "
    "generator of its own that serves several",
    "gradients that the training loop computes in the turn of another client than the one whose data they are of",
    "the model's buffers, which the optimizer does not see, such as the statistics of BatchNorm layers",
    "what a rank prints or saves, and the fact that it fails or ends, which other ranks notice",
    "step sizes, and the decision to stop, if the training loop chooses them by losses or gradients without noise",
)
REPEATED = "other trainings with the same seed, start and settings: their noise is the same, so differences reveal data"
FORGETFUL = "releases made after the state from which a new process continues: without ledger= they are not recorded"
Account = dict[str, tuple[float, int]]  # an optimizer's random name → noise multiplier, releases
_accounts: dict[str, Account] = {}  # in this process: an optimizer's random name → the account of its training


class OptimizerNoise:
    """A `Mechanism` for the user's own training loop."""

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
        own: str,
        witness: str | Path | None = None,
        weights: tuple[float, ...] = (),
    ) -> None:
        """Raises `UsageError` if no rule covers the statement.

        `start` is a checksum and `own` a random name of the optimizer, both the same on all ranks. `weights`: n·w_i of
        all clients; empty for equal weights.
        """
        if rounds is None:
            raise UsageError("privacy needs rounds, the number of steps that the noise must last for")
        if privacy.unit != "client" or privacy.sampling is not None:
            raise UsageError(
                "the optimizer protects whole clients, all of which take part; use unit='client' and no sampling"
            )
        if privacy.noise_schedule != "constant":
            raise UsageError(
                "the optimizer adds the same noise in every step; leave out noise_schedule, or use normec.train"
            )
        if privacy.correlates:
            raise UsageError(
                "the optimizer's clients take part in every step, where correlated noise gains nothing; leave out "
                "noise_bands, or use normec.train"
            )
        refuse_mixing_methods(method, dimension)
        privacy = privacy.with_noise("secure")
        if ledger is None and privacy.noise != "seeded":
            raise UsageError(
                f"noise={privacy.noise!r} needs ledger=, a file on rank 0 that records every release; "
                "for a simulation without a ledger choose noise='seeded'"
            )
        public = {"method": identity_of(method), "privacy": privacy.to_dict(), "rounds": rounds, "clients": clients}
        self._public, self._start = public | {"dimension": dimension, "seed": seed}, start
        if weights:
            self._public["weights"] = weights
        setting = Setting(
            clients,
            rounds,
            dimension=method.message_length(dimension),
            parameters=dimension,
            weights=weights,
        )
        gaps = GAPS if ledger is not None else (*GAPS, FORGETFUL)
        if seed is not None and privacy.noise == "seeded":
            gaps = (*gaps, REPEATED)
        source = seed if seed is not None else communicator.on_rank_zero(lambda: secrets.randbits(128))
        if witness is not None and ledger is None:
            raise UsageError("witness counts the lines of a ledger; give ledger as well, or leave witness out")
        outside = Path(witness) if witness is not None else None
        self._mechanism = mechanism = Mechanism(privacy, method, setting, source, self._name(), NOTES, gaps, outside)
        self._communicator, self._rounds, self._clients = communicator, rounds, clients
        self._budget = Budget(mechanism, communicator, {}, name=own)
        self._ledger = Path(ledger) if ledger is not None else None
        self._own = own
        self._multiplier = mechanism.release.event(mechanism.sigma).multiplier
        _accounts[self._own] = {self._own: (self._multiplier, 0)}
        communicator.on_rank_zero(self._open)
        self.close = weakref.finalize(self, mechanism.close)

    @property
    def mechanism(self) -> Mechanism:
        """The noise and its account."""
        return self._mechanism

    def _open(self) -> None:
        if self._ledger is not None:
            self._ledger.parent.mkdir(parents=True, exist_ok=True)
            self._mechanism.open(self._ledger)

    def _name(self) -> str:
        """Return the first part of the name of this training's noise."""
        return hashlib.sha256(json.dumps([self._public, self._start], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def bound(self) -> float:
        """The norm of a message for which the noise was calibrated."""
        return self._mechanism.release.bound

    @property
    def _account(self) -> Account:
        return _accounts[self._own]

    def state(self) -> dict[str, Any]:
        """Return what a saved state needs: the start, and the head of the ledger or the account with its statement."""
        if self._ledger is not None:
            return {"start": self._start, "ledger": self._mechanism.head}
        account = {name: list(paid) for name, paid in self._account.items()}
        return {"start": self._start, "statement": self._mechanism.privacy.to_dict(), "account": account}

    def load(self, held: dict[str, Any]) -> None:
        """Merge the account of a saved state with this one, and continue with its noise. Collective."""
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
        merged = _merged([self._account, *saved, *known])
        _accounts.update(dict.fromkeys(merged, merged))

    def difference(self, held: dict[str, Any]) -> str | None:
        """Return why this optimizer cannot continue from a saved state with the account `held`, or None."""
        if self._ledger is None and "account" not in held:
            return "its releases are in a ledger; pass the same ledger= here"
        if self._ledger is not None and "ledger" not in held:
            return "its releases are in no ledger; continue without ledger=, or start again"
        if self._ledger is not None:
            return None  # the ledger itself was opened for this statement
        changed = self._mechanism.privacy.difference(held["statement"])
        if changed is None:
            return None
        name, before, now = changed
        return f"{name} is {before!r} in the state, {now!r} here; keep the statement, or start again"

    def pay(self, round: int) -> None:
        """Pay for one more release in `round`; raises `BudgetSpent` on every rank. Collective."""
        if round >= self._rounds:
            raise UsageError(
                f"the noise was calibrated for {self._rounds} rounds, and this would be one more; give a larger rounds="
            )
        self._take_account()
        self._budget.begin()
        self._budget.pay(round)
        self._account[self._own] = self._multiplier, self._account[self._own][1] + 1

    def _take_account(self) -> None:
        """Load what was paid for so far, possibly by another optimizer of this training."""
        if self._ledger is None:
            self._mechanism.take_account(Event(z, count=count) for z, count in self._account.values() if count)

    def outgoing(self, messages: Tensor, clients: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (what this rank sends, what the memories take).

        `weights`: n·w_i of these clients; None if all weights are equal.
        """
        kept = self._mechanism.send(messages, clients, weights)
        return self._mechanism.outgoing(torch.zeros_like(messages[0]), len(clients) / self._clients), kept

    def received(self, whole: Tensor, like: Tensor) -> Tensor:
        return self._mechanism.received(whole, like)

    def spent(self) -> Spent:
        """Return the exact account. Collective."""
        self._take_account()
        return self._budget.spent()


def _merged(accounts: Iterable[Mapping[str, Sequence[Any]]]) -> Account:
    """Merge accounts; for each optimizer the larger number of releases counts."""
    together: Account = {}
    for account in accounts:
        for name, (multiplier, releases) in account.items():
            together[name] = multiplier, max(releases, together.get(name, (multiplier, 0))[1])
    return together
