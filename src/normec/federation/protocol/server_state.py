"""What the server keeps: x, ĝ, each party's row g_i, and its book about each party; with its way to the disk and back.

The row of a party is its memory as the server can follow it (`Method.follow`) from the messages it saw. With error
feedback that is what the messages add up to, g_i ← (1−λ) g_i + β m̂_i, and hence ĝ = mean g_i exactly. A method without
`follow` has no rows.

Under "local" trust the server could compute the rows from what it saw in any case, so keeping them tells nobody
anything; a party's own memory equals its row if it takes the noisy message, and differs from it by its own noise if it
takes the clean one. Under "central" trust the rows are clean, as all that the server sees is.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...algorithms.method import MEMORY, Steps, rows_like
from ...training.run import State
from .method_checks import keeps_rows
from .wire import Array, Record

TOKENS = 8  # hellos that are kept by their tokens; an older one that comes again counts as one more life


@dataclass
class Seat:
    """The server's book about one party; see `wire.Record`. `tokens`: its newest hellos, the last heard last.

    `lives`: how many hellos with tokens of their own there were. `drops`: messages that continued its chain and were
    dropped all the same; `faults`: all its bad messages.
    """

    accepted: int = 0
    since: int = 0
    digest: str = ""
    dropped: str = ""
    tokens: list[str] = field(default_factory=list)
    lives: int = 0
    drops: int = 0
    faults: int = 0

    def record(self, row: Array | None) -> Record:
        last = self.tokens[-1] if self.tokens else ""
        return Record(self.accepted, self.since, self.digest, self.dropped, self.lost, last, row)

    @property
    def lost(self) -> int:
        """Messages that may have been made and were not accepted: one for each drop, and each life but the first."""
        return self.drops + max(0, self.lives - 1)

    def made(self, opened: int) -> int:
        """The most messages that the party may have made in the `opened` rounds that it was asked in.

        One more than were accepted may be under way, unless one of every round was accepted.
        """
        return min(self.accepted + 1, opened) + self.lost

    def greet(self, token: str) -> None:
        """A hello. An earlier life's may come last: whoever repeats its own is the one that is answered."""
        if token in self.tokens:
            self.tokens.remove(token)
        else:
            self.lives += 1
        self.tokens = [*self.tokens[1 - TOKENS :], token]

    def accept(self, digest: str, round: int) -> None:
        self.accepted, self.since, self.digest, self.dropped = self.accepted + 1, round + 1, digest, ""


@dataclass
class ServerState:
    """`run` is the state as any run has it: round, x, the rows as its memory, ĝ, and the count of messages.

    `number` is random, drawn when the run begins: parties know the run by its name and this number.
    """

    run: State
    seats: dict[str, Seat]
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    @staticmethod
    def fresh(steps: Steps, x0: Tensor, parties: Sequence[str]) -> ServerState:
        rows = {}
        if keeps_rows(steps):
            rows[MEMORY] = rows_like(steps.initial_client_state[MEMORY].to(x0), len(parties)).clone()
        server = {name: value.clone() for name, value in steps.initial_server_state.items()}
        return ServerState(State(0, x0.clone(), rows, server, {}), {node: Seat() for node in parties})

    @staticmethod
    def restored(steps: Steps, tensors: dict[str, Tensor], facts: dict[str, Any]) -> ServerState:
        seats = {node: Seat(**kept) for node, kept in facts["seats"].items()}
        rows = {MEMORY: tensors[f"client.{MEMORY}"]} if keeps_rows(steps) else {}
        server = {name: tensors[f"server.{name}"] for name in steps.initial_server_state}
        run = State(facts["round"], tensors["x"], rows, server, {}, facts["messages"])
        return ServerState(run, seats, facts["number"])

    def facts(self) -> dict[str, Any]:
        seats = {node: dataclasses.asdict(seat) for node, seat in self.seats.items()}
        return {"messages": self.run.messages, "seats": seats, "number": self.number}
