"""The privacy budget of a run: rank 0 records a round in the ledger before anything is released, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BudgetSpent, UsageError
from ..problems.objective import Buffers
from .communicator import Communicator

if TYPE_CHECKING:
    from ..privacy.ledger import Payments
    from ..privacy.mechanism import Mechanism, Spent


class Budget:
    """The account of one run, which rank 0 keeps in the run's folder."""

    def __init__(
        self,
        mechanism: Mechanism,
        communicator: Communicator,
        first_buffers: Buffers,
        kept: bool = False,
        name: str = "",
    ) -> None:
        """`kept`: whether the run has a folder, and therefore a ledger. `name`: that of the account on all ranks."""
        self._mechanism, self._communicator, self._first_buffers = mechanism, communicator, first_buffers
        self._kept, self._name = kept, name
        self._paid_for = False
        self._same = True  # whether the releases in the ledger belong to the same run and data

    def open(self, folder: Path | None, head: list[Any] | None, resumed: bool) -> None:
        """Open the ledger in the run's folder, if this rank has the folder.

        `head` is the state of the ledger at the last checkpoint. `resumed`: a checkpoint shows that the releases in the
        ledger belong to this run and the same data. Without a checkpoint this is unknown, and every round is paid for.
        """
        if folder is not None:
            self._mechanism.open(folder / "ledger.jsonl", head)
            self._same = resumed or not self._mechanism.begun

    def begin(self) -> None:
        """Begin a round, for the first time or again; it is not paid for yet."""
        self._paid_for = False

    @property
    def paid(self) -> bool:
        """Whether the current round is paid for."""
        return self._paid_for

    def pay(self, round: int, key: str | None = None) -> None:
        """Pay for one release of `round`; raises `BudgetSpent` on every rank. Collective.

        The first call after `begin` pays for one release; later calls do nothing. For `key` see `Mechanism.pay`.
        """
        if self._paid_for:
            return
        reply = self._from_rank_zero(
            "pay", lambda: self._pay_here(round, key if self._same else None), f"round {round} is not paid for"
        )
        if reply["refused"] is not None:
            raise BudgetSpent.from_text(round, reply["refused"])
        if self._communicator.rank:
            self._mechanism.paid_elsewhere(reply["round"], reply["attempt"])
        self._paid_for = True

    def _pay_here(self, round: int, key: str | None) -> dict[str, Any]:
        """Pay in the account of this rank, and return what the other ranks must know."""
        if self._kept and self._mechanism.head is None:  # an account in memory would be lost when the process ends
            raise UsageError(f"round {round} cannot be paid for, because the ledger is not open; start the run again")
        try:
            self._mechanism.pay(round, key)
        except BudgetSpent as spent:
            return {"refused": str(spent), "round": round, "attempt": 0}
        return {"refused": None, "round": round, "attempt": self._mechanism.attempt}

    def _from_rank_zero(self, what: str, action: Callable[[], dict[str, Any]], otherwise: str) -> dict[str, Any]:
        """Return the result of `action` on rank 0; raises `UsageError` if rank 0 makes another call than this rank.

        A payment in another account has other noise. `what` names the call, and `otherwise` says what is then missing.
        """
        call = [self._name, what]
        reply: Any = self._communicator.on_rank_zero(lambda: {"call": call, "result": action()})
        if not isinstance(reply, dict) or reply.get("call") != call:
            raise UsageError(
                f"{otherwise}, because rank 0 does something else at this point; every rank must make the same calls "
                "in the same order, also those of several optimizers"
            )
        result: dict[str, Any] = reply["result"]
        return result

    def refuse_moving_state(self, buffers: Buffers, constants: list[str] | None) -> None:
        """Refuse buffers and frozen parameters that a forward pass changes, because no noise covers them.

        `constants` are the frozen parameters that have changed; None if the model has no frozen parameters.
        """
        if not self._first_buffers and constants is None:
            return
        moved = [
            f"buffer {name}" for name, before in self._first_buffers.items() if not torch.equal(before, buffers[name])
        ]
        moved += [f"frozen parameter {name}" for name in constants or ()]
        for what in (what for found in self._communicator.all_gather(moved) for what in found):
            raise UsageError(f"the {what} changes with the data and no noise covers it; remove it from the model")

    def payments(self) -> Payments | None:
        """Return what rank 0 paid without a ledger; None on other ranks, and where there is a ledger."""
        return self._mechanism.payments() if self._communicator.rank == 0 and not self._kept else None

    def epsilon_to_end(self, round: int, key: str | None) -> float:
        """Return `Mechanism.epsilon_to_end` on all ranks. Collective."""
        key = key if self._same else None
        found: float = self._communicator.on_rank_zero(lambda: self._mechanism.epsilon_to_end(round, key))
        return found

    def spent(self) -> Spent:
        """Return the exact account, on all ranks. Collective."""
        from ..privacy.mechanism import Spent

        spent = self._from_rank_zero("spent", lambda: self._mechanism.spent().to_dict(), "it is unknown what was spent")
        return Spent(**spent | {name: tuple(spent[name]) for name in ("not_covered", "notes")})
