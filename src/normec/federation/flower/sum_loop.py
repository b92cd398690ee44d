"""The rounds of a run with secure sums over the network: the parties introduce themselves, then exchanges follow.

An exchange closes as soon as every party that was asked and is still online has answered, if there are enough answers.
At the time limit (`round_seconds`) it closes with the answers that there are; the others have dropped out of the
attempt. If too few are left, the round is attempted again with new keys. A party that was silent until the limit is
suspended (`suspension`), so that the next exchanges do not wait for it.

Asking for keys costs nothing, so that exchange waits until enough parties are online. An attempt that fails later has
cost the parties a payment, so the next one begins after a pause, which doubles with each failure. One party without
which no sum can be made could spend the budgets of all others like this, so the run stops after some such attempts.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError, WireError
from ...system.files import write_atomic
from ..protocol.introduction import agreed, introduced
from ..protocol.sum_terms import FOLDER
from ..protocol.wire import Refusal, SumReply, SumRequest, from_fields, most_octets, octets
from ..secure_sum.roster import Roster
from .correspondence import Correspondence
from .limits import MessageLimits
from .mailbox import Incoming, Mailbox
from .presence import WAIT, Clock, Presence, Say, Timeouts
from .run_parties import RunParties, kept_names
from .suspension import Suspensions

if TYPE_CHECKING:
    from ..protocol.sum_coordinator import SumCoordinator

ROSTER, NODES = "roster.toml", "nodes.json"
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds after an attempt that failed; doubles with each failure
OPENINGS = 3  # time limits after which a sum that cannot be opened is given up
COSTLY = ("vectors", "signatures", "reveals")  # an attempt that fails in these stages was paid for
FAILURES, ROUNDS = 8, 2  # how many such attempts a run has to spare: so many, and one more for every so many rounds


def sum_limits(length: int) -> MessageLimits:
    """The limits of a party's answer for vectors of this length."""
    return MessageLimits.of_bytes(most_octets(length))


def introductions(
    mailbox: Mailbox,
    parties: RunParties,
    folder: Path,
    name: str,
    seconds: float,
    say: Say,
    clock: Clock = time.monotonic,
) -> tuple[Roster, list[str]]:
    """The roster that all parties pinned, and the parties' names in its order; kept in the folder of the run.

    Raises:
        UsageError: A party refuses, shows another roster than the others, or does not answer in time.
    """
    kept = folder / FOLDER
    if (kept / NODES).exists():
        return Roster.load(kept / ROSTER), kept_names(kept / NODES, "nodes")
    run, until, found = f"{name}~{secrets.token_hex(8)}", clock() + seconds, dict[str, tuple[Roster, int]]()
    presence, asked = Presence(parties), dict[str, str]()
    while len(found) < len(parties.names):
        now = clock()
        presence.look(now)
        due = {
            here.node: SumRequest(run, node, 0, "roster", octets(b"?"))
            for node, here in presence.online.items()
            if node not in found and asked.get(node) != here.since
        }
        asked |= {request.node: presence.online[request.node].since for request in due.values()}
        mailbox.post(due, ttl=seconds + 60)
        incoming = mailbox.next(WAIT)
        if incoming is not None:
            node = parties.name(incoming.node)
            if incoming.lost:
                asked.pop(node, None)
                continue
            found[node] = _introduced(incoming, run, node)
        elif now > until:
            missing = ", ".join(node for node in parties.names if node not in found)
            raise UsageError(
                f"no roster came within start_seconds = {seconds:g} from {missing}; start them, then the run again"
            )
    members, nodes = agreed(found)
    kept.mkdir(parents=True, exist_ok=True)
    members.save(kept / ROSTER)
    write_atomic(kept / NODES, json.dumps({"nodes": nodes}) + "\n")
    say(f"all {len(nodes)} parties have the same roster")
    return members, nodes


def _introduced(incoming: Incoming, run: str, node: str) -> tuple[Roster, int]:
    try:
        if incoming.fields is None:
            raise WireError(incoming.fault)
        message = from_fields(incoming.fields)
        if isinstance(message, Refusal):
            raise UsageError(
                f"{node} takes no part in secure sums ({message.reason}): its policy must have trusts = "
                '["secure-sum"], a roster and an identity; see its log'
            )
        if not isinstance(message, SumReply) or (message.run, message.node) != (run, node):
            raise WireError("it answers another question")
        return introduced(message.content.tobytes(), run, node)
    except WireError as error:
        raise UsageError(f"{node} does not show a roster: {error}") from None


def run_sums(
    coordinator: SumCoordinator,
    mailbox: Mailbox,
    parties: RunParties,
    timeouts: Timeouts,
    say: Say,
    clock: Clock = time.monotonic,
) -> None:
    """Run all remaining rounds."""
    loop = _Sums(coordinator, mailbox, parties, timeouts, say, clock)
    while not coordinator.finished:
        loop.exchange()


class _Sums(Correspondence):
    def __init__(
        self,
        coordinator: SumCoordinator,
        mailbox: Mailbox,
        parties: RunParties,
        timeouts: Timeouts,
        say: Say,
        clock: Clock,
    ) -> None:
        super().__init__(coordinator, mailbox, Presence(parties), Suspensions(), timeouts, say, clock)
        self._coordinator = coordinator
        self._round, self._round_began, self._failures = -1, 0.0, 0
        self._wasted, self._at_fault = 0, Counter[str]()  # attempts that were paid for in vain, and because of whom

    def exchange(self) -> None:
        """Run the current exchange to its end."""
        coordinator, number = self._coordinator, self._coordinator.exchange
        self._asked, self._silent, began = {}, set(), self._clock()
        if coordinator.round != self._round:
            self._round, self._round_began, self._failures = coordinator.round, began, 0
        deadline, again, taken, limits = began + self._timeouts.round, True, False, 0
        while coordinator.exchange == number and not coordinator.finished:
            now = self._clock()
            if self._presence.look(now) or again:
                again = False
                self._ask(now)
            incoming = self._mailbox.next(0.0 if taken else WAIT)
            taken = incoming is not None
            if incoming is not None:
                self._take(incoming, number)
                continue  # process all answers that are there before anything is decided
            late = now > deadline
            if late:
                self._suspend_silent("an exchange", now)
            if self._hopeless():
                return
            if self._complete() or (late and coordinator.stage != "keys"):
                self._close()
            if now - self._round_began > self._timeouts.wait:
                coordinator.stop(
                    f"round {coordinator.round}: no sum was opened within wait_seconds = {self._timeouts.wait:g}, "
                    f"{coordinator.minimum} parties are needed; start the missing parties, then start the run again"
                )
            elif late and coordinator.exchange == number:  # nothing could be closed: ask again
                limits += 1
                if coordinator.stage == "reveals" and limits >= OPENINGS:
                    coordinator.repeat_round()
                    self._note_failure("reveals")
                if coordinator.stage == "keys":
                    coordinator.invite_everyone()
                self._asked.clear()
                deadline, again = now + self._timeouts.round, True

    def _complete(self) -> bool:
        """Whether nobody is left to wait for: everybody has answered or refused, or is offline, or is not trusted."""
        coordinator = self._coordinator
        if self._waits():
            return False
        return coordinator.answered >= coordinator.needed or (coordinator.ready and coordinator.stage != "keys")

    def _close(self) -> None:
        coordinator, round, attempt = self._coordinator, self._coordinator.round, self._coordinator.attempt
        stage, left = coordinator.stage, coordinator.answered
        coordinator.close_exchange()
        if coordinator.round > round:
            self._say(f"round {round}: a sum of {coordinator.summed} of {len(coordinator.parties)} parties")
        elif coordinator.stage == "keys" and stage != "keys" and coordinator.attempt != attempt:
            pause = min(LONGEST_PAUSE, PAUSE * 2.0**self._failures)
            self._failures += 1
            self._note_failure(stage)
            if not coordinator.finished:
                self._say(f"round {round}: {left} parties were left after {stage}; another attempt in {pause:g} s")
                self._mailbox.wait(pause)

    def _note_failure(self, stage: str) -> None:
        """Count an attempt that failed, and stop the run if too many have cost the parties a payment."""
        coordinator = self._coordinator
        if stage not in COSTLY:
            return
        self._wasted += 1
        self._at_fault.update(coordinator.at_fault)
        if self._wasted > FAILURES + coordinator.round // ROUNDS:
            blamed = ", ".join(f"{name} ({count} times)" for name, count in self._at_fault.most_common(3))
            coordinator.stop(
                f"round {coordinator.round}: {self._wasted} attempts failed that the parties had paid for; missing, "
                f"or with seeds that could not be recovered, were {blamed}; look into their logs before you start the "
                "run again, or begin one without them"
            )

    def _ask(self, now: float) -> None:
        """Send the exchange to all parties that are online, not suspended, and not asked since they came online."""
        due = {}
        for name in sorted(self._coordinator.addressees):
            here = self._presence.online.get(name)
            if here is None or self._suspensions.suspended(name, now) or self._asked.get(name) == here.since:
                continue
            self._asked[name], self._since[name] = here.since, now
            self._silent.add(name)
            due[here.node] = self._coordinator.request(name)
        self._mailbox.post(due, ttl=2 * self._timeouts.round + 60)

    def _hopeless(self) -> bool:
        """Stop the run if so many parties refuse that no sum can be opened. Returns whether it stopped."""
        coordinator, refusals = self._coordinator, self._coordinator.refusals
        if len(coordinator.parties) - len(refusals) >= coordinator.minimum:
            return False
        coordinator.stop(f"{self._refused()}, {coordinator.minimum} are needed; their logs name what they refuse")
        return True
