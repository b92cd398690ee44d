"""A secure sum: processor time of a party and of the server for one round, and the bytes that travel.

    python -m benchmarks.speed.secure_sum --parties 3,10,50,200 --dimensions 1000,1000000

All parties run in this process, and their folders are temporary. The round is the second one, so keys and shares of the
next round travel with it, as in every round but the first. In a second measurement one party disappears before it sends
its vector, so the server recovers its key from shares and removes its masks. With 200 parties a measurement takes a
quarter of an hour, because all of them deal their shares on one core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from normec.federation.secure_sum.keys import Identity
from normec.federation.secure_sum.party import Assignment, Contribution, Party
from normec.federation.secure_sum.roster import Member, Roster
from normec.federation.secure_sum.server import Server, Stage
from normec.federation.secure_sum.terms import Terms, least_threshold

Result = TypeVar("Result")


class Zeros:
    """A contributor whose vector is zero, so that all time is the protocol's."""

    def __init__(self, dimension: int) -> None:
        self._vector = np.zeros(dimension, dtype=np.uint32)

    def pay(self, assignment: Assignment) -> None: ...

    def contribute(self, assignment: Assignment) -> Contribution:  # noqa: ARG002
        return Contribution(self._vector)

    def settle(self, attempt: int, counted: bool) -> None: ...

    def recover(self, attempts: Sequence[int], deposited: tuple[int, bytes] | None) -> None: ...


@dataclass
class Measured:
    """Seconds of each party in each stage, seconds of the server, and bytes to and from one party."""

    party: dict[Stage, list[float]] = field(default_factory=dict)
    server: float = 0.0
    received: int = 0
    sent: int = 0

    def seconds_of_party(self) -> float:
        return sum(statistics.median(times) for times in self.party.values())


def timed(action: Callable[..., Result], *given: object) -> tuple[Result, float]:
    begun = time.process_time()
    return action(*given), time.process_time() - begun


def summed(server: Server, parties: list[Party], round: int, absent: int | None, payload: bytes) -> Measured:
    """One sum; party `absent` sends no vector and nothing after it."""
    measured = Measured()
    measured.server += timed(server.start, round, payload)[1]
    while server.sum is None:
        stage = server.stage
        for number in server.addressees:
            if number == absent and stage >= Stage.VECTORS:
                continue
            request, asking = timed(server.request, number)
            answer, answering = timed(parties[number].answer, request)
            _, receiving = timed(server.receive, number, answer)
            measured.server += asking + receiving
            measured.party.setdefault(stage, []).append(answering)
            if number == 0:
                measured.received, measured.sent = measured.received + len(request), measured.sent + len(answer)
        measured.server += timed(server.advance)[1]
    return measured


def measure(folder: Path, count: int, dimension: int) -> tuple[Measured, Measured]:
    """A round with everybody, and one in which a party disappears (the same if nobody may)."""
    keys = [Identity.generate() for _ in range(count)]
    roster = Roster(tuple(Member(f"party-{number}", key.public) for number, key in enumerate(keys)))
    threshold = least_threshold(count)
    terms = Terms(
        run="speed",
        roster=roster.digest.hex(),
        parties=count,
        threshold=threshold,
        minimum=threshold,
        colluding=0,
        sigma=0.0,
        step=1.0,
        dimension=dimension,
        rounds=4,
        weights=(1.0,) * count,
        method="none",
    )
    parties = [Party(folder / str(number), key, roster, terms, Zeros(dimension)) for number, key in enumerate(keys)]
    payload = bytes(4 * dimension)
    with Server(folder / "server", roster, terms) as server:
        summed(server, parties, 0, None, payload)
        everybody = summed(server, parties, 1, None, payload)
        one_less = summed(server, parties, 2, count - 1 if threshold < count else None, payload)
    for party in parties:
        party.close()
    return everybody, one_less


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", default="3,10,50,200")
    parser.add_argument("--dimensions", default="1000,1000000")
    given = parser.parse_args()
    columns = ("parties", "dimension", "party, s", "its vector, s", "server, s", "one dropout, s", "MB to", "MB from")
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for dimension in map(int, given.dimensions.split(",")):
        for count in map(int, given.parties.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                everybody, one_less = measure(Path(folder), count, dimension)
            vector = statistics.median(everybody.party[Stage.VECTORS])
            seconds = (everybody.seconds_of_party(), vector, everybody.server, one_less.server)
            megabytes = (everybody.received / 1e6, everybody.sent / 1e6)
            values = [f"{one:.3f}" for one in seconds] + [f"{one:.2f}" for one in megabytes]
            print("| " + " | ".join([str(count), str(dimension), *values]) + " |", flush=True)


if __name__ == "__main__":
    main()
