"""The privacy budget of a run: rank 0 pays for a round in the ledger before anything leaves, and all ranks know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BudgetSpent, UsageError
from ..problems.objective import Buffers
from .communicator import Communicator

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism, Spent


class Budget:
    """One run's account, kept by rank 0 beside the run's folder."""

    def __init__(
        self, mechanism: Mechanism, communicator: Communicator, first_buffers: Buffers, kept: bool = False
    ) -> None:
        """`kept`: whether the run has a folder, and with it a ledger."""
        self._mechanism, self._communicator, self._first_buffers = mechanism, communicator, first_buffers
        self._kept = kept
        self._asked = False
        self._same = True  # whether releases in the ledger are of the same run and data

    def open(self, folder: Path | None, head: list[Any] | None, resumed: bool) -> None:
        """Keep the account in the run's folder, if this rank has it.

        `head`: the ledger as a checkpoint knew it. `resumed`: a checkpoint says that the releases in the ledger are
        this run's, of the same data. Without one nothing does, and every round is paid for.
        """
        if folder is not None:
            self._mechanism.open(folder / "ledger.jsonl", head)
            self._same = resumed or not self._mechanism.begun

    def begin(self) -> None:
        """A round begins, for the first time or again: nothing of it is paid for yet."""
        self._asked = False

    @property
    def paid(self) -> bool:
        """Whether the round that has begun was paid for already."""
        return self._asked

    def pay(self, round: int, key: str | None = None) -> None:
        """Pay for one release of `round`; raises `BudgetSpent`, on every rank. All ranks call together.

        The first call after `begin` pays for one release; the others do nothing. `key`: see `Mechanism.pay`.
        """
        if self._asked:
            return
        said = self._communicator.on_rank_zero(lambda: self._paid(round, key if self._same else None))
        if said["refused"] is not None:
            raise BudgetSpent.said(round, said["refused"])
        if self._communicator.rank:
            self._mechanism.paid_elsewhere(said["round"], said["attempt"])
        self._asked = True

    def _paid(self, round: int, key: str | None) -> dict[str, Any]:
        if self._kept and self._mechanism.head is None:  # an account in memory would be lost with the process
            raise UsageError(f"round {round} cannot be paid for, because the ledger is not open; start the run again")
        try:
            self._mechanism.pay(round, key)
        except BudgetSpent as spent:
            return {"refused": str(spent), "round": round, "attempt": 0}
        return {"refused": None, "round": round, "attempt": self._mechanism.attempt}

    def refuse_moving_state(self, buffers: Buffers, constants: list[str] | None) -> None:
        """A buffer or frozen parameter that a forward pass changes is a function of the data that no noise covers.

        `constants`: frozen parameters that have changed, None where there are none.
        """
        if not self._first_buffers and constants is None:
            return
        moved = [
            f"buffer {name}" for name, before in self._first_buffers.items() if not torch.equal(before, buffers[name])
        ]
        moved += [f"frozen parameter {name}" for name in constants or ()]
        for what in (what for said in self._communicator.all_gather(moved) for what in said):
            raise UsageError(f"the {what} changes with the data and no noise covers it; remove it")

    def spent(self) -> Spent:
        """The exact account, known to all ranks."""
        from ..privacy.mechanism import Spent

        told: dict[str, Any] = self._communicator.on_rank_zero(lambda: self._mechanism.spent().to_dict())
        return Spent(**told | {name: tuple(told[name]) for name in ("not_covered", "notes")})
