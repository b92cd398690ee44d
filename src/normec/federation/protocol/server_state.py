"""The state of the server: x, ĝ, each party's row g_i, and a record of each party; and its form in the checkpoint.

The row of a party is the memory of that party as the server can follow it (`Method.follow`) from the messages it has
received. With error feedback it is a weighted sum of them, g_i ← (1−λ) g_i + β m̂_i, and hence ĝ = mean g_i exactly. A
method without `follow` has no rows.

Under "local" trust the server could compute the rows from the messages in any case, so keeping them reveals nothing
new. A party's own memory equals its row if it is updated with the noisy message, and differs from it by the party's
own noise if it is updated with the clean one. Under "central" trust the rows contain no noise, like all messages that
the server receives.
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

OPTIMIZER = "optimizer."  # what the names of the server's optimizer's tensors begin with in the checkpoint
TOKENS = 8  # the newest handshakes are remembered by their tokens; an older one that is repeated counts as a new one
# Names in the checkpoint, which must stay the same so that older runs can be continued.
PARTIES, _HANDSHAKES = "seats", "lives"


@dataclass
class PartyRecord:
    """What the server knows about one party; `wire.Record` is the part that the party is sent.

    `tokens` are those of the newest handshakes, the most recent one last, and `handshakes` counts all handshakes with
    different tokens. `drops` counts messages that continued the party's chain and were dropped nevertheless; `faults`
    counts all invalid messages.
    """

    accepted: int = 0
    since: int = 0
    digest: str = ""
    dropped: str = ""
    tokens: list[str] = field(default_factory=list)
    handshakes: int = 0
    drops: int = 0
    faults: int = 0

    def to_wire(self, row: Array | None) -> Record:
        last = self.tokens[-1] if self.tokens else ""
        return Record(self.accepted, self.since, self.digest, self.dropped, self.lost, last, row)

    @property
    def lost(self) -> int:
        """Messages that may have been made but were not accepted: one per drop, and one per handshake but the first."""
        return self.drops + max(0, self.handshakes - 1)

    def made(self, opened: int) -> int:
        """The most messages that the party may have made in the `opened` rounds in which it was asked.

        One more than the accepted ones may be under way, unless the party's message of every round was accepted.
        """
        return min(self.accepted + 1, opened) + self.lost

    def note_handshake(self, token: str) -> None:
        """Make `token` the one that the next request answers.

        A handshake that the party began before it lost its disk may arrive last. The party repeats its own handshake,
        and the one that is repeated is answered.
        """
        if token in self.tokens:
            self.tokens.remove(token)
        else:
            self.handshakes += 1
        self.tokens = [*self.tokens[1 - TOKENS :], token]

    def accept(self, digest: str, round: int) -> None:
        self.accepted, self.since, self.digest, self.dropped = self.accepted + 1, round + 1, digest, ""

    def to_facts(self) -> dict[str, Any]:
        """The record as the checkpoint holds it."""
        facts = dataclasses.asdict(self)
        facts[_HANDSHAKES] = facts.pop("handshakes")
        return facts

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> PartyRecord:
        others = {name: value for name, value in facts.items() if name != _HANDSHAKES}
        return PartyRecord(**others, handshakes=facts.get(_HANDSHAKES, 0))


@dataclass
class ServerState:
    """The state of a federated run at the server.

    `run` is the state that any run has: round, x, the rows g_i as its memory, ĝ, and the count of messages. `number` is
    random and drawn when the run begins; parties identify the run by its name and this number.
    """

    run: State
    parties: dict[str, PartyRecord]
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    @staticmethod
    def fresh(steps: Steps, x0: Tensor, parties: Sequence[str], *, rows: bool = True) -> ServerState:
        """The state before round 0; `rows`: whether the server follows the memories of the parties."""
        tables = {}
        if rows and keeps_rows(steps):
            tables[MEMORY] = rows_like(steps.initial_client_state[MEMORY].to(x0), len(parties)).clone()
        server = {name: value.clone() for name, value in steps.initial_server_state.items()}
        return ServerState(State(0, x0.clone(), tables, server, {}), {node: PartyRecord() for node in parties})

    @staticmethod
    def restored(steps: Steps, tensors: dict[str, Tensor], facts: dict[str, Any], *, rows: bool = True) -> ServerState:
        parties = {node: PartyRecord.from_facts(kept) for node, kept in facts[PARTIES].items()}
        tables = {MEMORY: tensors[f"client.{MEMORY}"]} if rows and keeps_rows(steps) else {}
        server = {name: tensors[f"server.{name}"] for name in steps.initial_server_state}
        optimizer = {
            name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)
        }
        run = State(facts["round"], tensors["x"], tables, server, {}, facts["messages"], optimizer)
        return ServerState(run, parties, facts["number"])

    def facts(self) -> dict[str, Any]:
        """What the checkpoint holds beside the tensors."""
        parties = {node: party.to_facts() for node, party in self.parties.items()}
        return {"messages": self.run.messages, PARTIES: parties, "number": self.number}
