"""The progress of a federation on this machine: its rounds, who is there, and what each party has spent."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..privacy.display import shown_delta, shown_epsilon
from ..storage.history import Row
from .output import printable, show
from .progress import Lines, ProgressDisplay, describe

if TYPE_CHECKING:
    from rich.table import Table

    from ..federation.local.federation import PartyStatus

COLUMNS = ("party", "state", ">messages", ">ε spent", ">of", "protected")


class FederationDisplay(ProgressDisplay):
    """Keeps the newest state of the parties, and shows nothing here."""

    statuses: Sequence[PartyStatus] = ()

    def parties(self, statuses: Sequence[PartyStatus]) -> None:
        """Take the newest state of the parties."""
        self.statuses = statuses


def federation_display(quiet: bool) -> FederationDisplay:
    """Return the display for this stderr."""
    if quiet:
        return FederationDisplay()
    return LiveTable() if sys.stderr.isatty() else PartyLines()


def cells(status: PartyStatus) -> tuple[str, ...]:
    """A party as a row of `COLUMNS`."""
    spent = status.spending
    if spent is None:
        return status.name, status.presence, "0", "0", "", ""
    budget = "" if spent["budget"] is None else f"{spent['budget']:g}"
    protected = f"each {spent['unit']}, at δ = {shown_delta(spent['delta'])}"
    sent = str(spent["releases"] + spent["without_noise"])
    return status.name, status.presence, sent, shown_epsilon(spent["epsilon"]), budget, protected


def show_parties(statuses: Sequence[PartyStatus]) -> None:
    """Print what each party has spent, by its own ledger."""
    columns = [column for column in COLUMNS if column != "state"]
    rows = [[cell for name, cell in zip(COLUMNS, cells(one), strict=True) if name != "state"] for one in statuses]
    if rows:
        show(rows, columns, title="by the ledgers of the parties")


class LiveTable(FederationDisplay):
    """A table that is drawn again in place, in a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
        self._rounds, self._round, self._seen = 0, 0, dict[str, Any]()
        self._live.start()

    def begin(self, first_round: int, rounds: int) -> None:
        self._round, self._rounds = first_round, rounds
        self._draw()

    def round(self, round: int) -> None:
        self._round = round

    def row(self, row: Row) -> None:
        self._seen |= row
        self._draw()

    def parties(self, statuses: Sequence[PartyStatus]) -> None:
        super().parties(statuses)
        self._draw()

    def _draw(self) -> None:
        self._live.update(self._table())

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        seen = describe(self._seen)
        table = Table(title=Text(printable(f"round {self._round} of {self._rounds}  {seen}")))
        for name in COLUMNS:
            table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
        for one in self.statuses:
            table.add_row(*(Text(printable(cell)) for cell in cells(one)))
        return table

    def close(self) -> None:
        self._live.stop()


class PartyLines(FederationDisplay):
    """A line for each change of who is there, and lines of progress, for logs."""

    def __init__(self) -> None:
        self._lines, self._known, self._since = Lines("federation"), dict[str, str](), time.monotonic()

    def begin(self, first_round: int, rounds: int) -> None:
        self._lines.begin(first_round, rounds)

    def row(self, row: Row) -> None:
        self._lines.row(row)

    def parties(self, statuses: Sequence[PartyStatus]) -> None:
        super().parties(statuses)
        for one in statuses:
            if self._known.get(one.name) != one.presence:
                self._known[one.name] = one.presence
                after = time.monotonic() - self._since
                print(f"{printable(one.name)} is {one.presence} after {after:.0f} s", file=sys.stderr, flush=True)
