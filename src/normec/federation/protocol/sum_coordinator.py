"""The server of a federation with secure sums, without a network: it makes exchanges, and moves x by each opened sum.

    while not coordinator.finished:
        for node, request in coordinator.requests().items(): …      send it to each party that has to answer
        coordinator.receive(node, fields)                           for each answer, including late ones
        if coordinator.ready: coordinator.close_exchange()          or after a time limit

A round is a sequence of exchanges (`secure_sum.Server`), at whose end one sum is opened. The caller decides how long an
exchange waits; a party that does not answer has dropped out of the attempt. If too few are left, the round is attempted
again, and the parties pay again.

The ledger of the run pays for a sum before the shares that open it are asked for, so it counts every sum that may have
been opened. Vectors of an attempt that comes to nothing stay masked; they are paid for in the ledgers of the parties,
which cannot know what a server does with them.

The opened sum lies in the folder of `secure_sum.Server` until the checkpoint of its round is written, and the next
attempt begins after that. So a server that is killed at any time applies each sum once, and opens none twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...algorithms.method import Method
from ...errors import BudgetSpent, UsageError, WireError
from ...privacy.grid_account import honest_parties
from ...privacy.secure_sum import SumGrid
from ...privacy.statement import Privacy
from ...sampling.participation import Everyone
from ...training.run import Plan
from ..secure_sum import server as secure_sum
from ..secure_sum.refusals import Refused
from ..secure_sum.roster import Roster
from ..secure_sum.server import AttemptFailed, OpenedSum, Stage
from ..secure_sum.terms import Terms
from ..secure_sum.wire import MaskedVector, decode_answers
from ..secure_sum.wire import Refusal as SumRefusal
from .federated_run import Evaluate, FederatedRun, writes
from .method_checks import public_vector
from .screening import Limits
from .sum_terms import FOLDER, SumPlan, grid_of, made_terms
from .wire import Octets, Refusal, SumReply, SumRequest, from_fields, octets

TERMS = "terms.json"
# The refusals that another attempt does not cure.
LASTING = ("terms", "budget", "restored", "history", "signature", "deposit")
Outcome = Literal["taken", "refused", "dropped"]


class SumCoordinator(FederatedRun):
    """A federated run in which the server receives one secure sum in each round.

    Args:
        method: The method; its messages must have a bound.
        x0: The initial model.
        parties: Names of the parties in the order of the roster.
        plan: The plan of the run.
        roster: The roster of the parties.
        colluding: How many parties may help the server without harm to the others.
        run: The name of the run.
        folder: The folder of the run.
        privacy: The privacy statement with trust="secure-sum"; None for sums that are only masked.
        minimum: The smallest number of parties in a sum.
        evaluate: Returns the metrics that the server measures at x.
        records: Public numbers of records, one for each party or one for all.
    """

    follows_memories = False

    def __init__(
        self,
        method: Method,
        x0: Tensor,
        parties: Sequence[str],
        plan: Plan,
        *,
        roster: Roster,
        colluding: int,
        run: str,
        folder: str | Path,
        privacy: Privacy | None = None,
        minimum: int,
        evaluate: Evaluate | None = None,
        records: Sequence[float] | None = None,
    ) -> None:
        if len(roster) != len(parties):
            raise UsageError(f"the roster has {len(roster)} parties, the run {len(parties)}")
        self.roster, self.colluding = roster, colluding
        self._refusals: dict[str, str] = {}  # by party, the newest reason that another attempt does not cure
        self._exchange, self.summed = 0, 0  # `summed`: the parties in the newest sum
        self.at_fault: list[str] = []  # the parties because of which the newest attempt failed
        self._server: secure_sum.Server | None = None
        self._payload: tuple[bytes, Octets] | None = None  # of the current attempt
        if privacy is not None:
            privacy = _counting_honest(privacy.with_noise("secure"), honest_parties(minimum, colluding))
        super().__init__(
            method,
            x0,
            parties,
            plan,
            run=run,
            privacy=privacy,
            folder=folder,
            minimum=minimum,
            evaluate=evaluate,
            records=records,
        )

    def _prepare(self) -> None:
        if not isinstance(self.plan.participation, Everyone):
            raise UsageError("in a secure sum all parties take part in every round; leave out the sampling of parties")
        if self._scheduled:
            raise UsageError("the noise of a secure sum between parties is constant; leave out noise_schedule")
        if not math.isfinite(self.method.bound):
            raise UsageError(
                f"{self.method.name} sends messages without a bound, which have no range in a secure sum; use a method "
                "that bounds its messages, such as normec, clip21 or dpsgd-clip"
            )

    @property
    def server(self) -> secure_sum.Server:
        """The server of the sums."""
        if self._server is None:
            raise UsageError("the run is closed")
        return self._server

    def _attach(self) -> None:
        folder = self._folder
        self.terms = self._made_terms()
        kept = folder / TERMS
        if kept.exists():
            differs = self.terms.first_difference(Terms.load(kept))
            if differs is not None:
                raise UsageError(f"{folder} holds sums under other terms: {differs} differs; use another folder")
        self._server = secure_sum.Server(folder, self.roster, self.terms)
        if not kept.exists():
            self.terms.save(kept)
        self.grid: SumGrid = grid_of(self.method, self.terms)
        bound = math.fsum(self.terms.weights) * self.method.bound
        self._limits = Limits.within(bound, self.grid.sum_sigma, self.message_length)

    @property
    def _folder(self) -> Path:
        if self.storage.out is None:
            raise UsageError("a run with secure sums needs a folder")
        return self.storage.out / FOLDER

    def _made_terms(self) -> Terms:
        plan, (_, stated) = self.plan, self._terms
        own = [one.records for one in self._plans]
        first, x = own[0], self.state.run.x
        public = public_vector(self._steps, self.state.run.server)
        sums = SumPlan(
            parameters=len(x),
            broadcast=len(public) if public is not None else 0,
            dtype=str(x.numpy().dtype),
            seed=plan.seed,
            batch_size=plan.batch_size or 0,
            noise=stated.noise,
            delta=stated.delta,
            unit=stated.unit,
            relation=stated.relation,
            memory=stated.memory,
            local=self._plans[0].local,
            divisors=tuple(one.divisor for one in own if one is not None) if first is not None else None,
            clip=first.clip if first is not None else None,
            by_layer=first.by_layer if first is not None else False,
            batch_rate=first.batch_rate if first is not None else None,
        )
        weights = (1.0,) * len(self.parties) if plan.weights is None else tuple(map(float, plan.weights.tolist()))
        return made_terms(
            self.run,
            self.roster,
            self.method,
            sums,
            sigma=self._sigmas[0],
            rounds=plan.rounds,
            minimum=self.minimum,
            colluding=self.colluding,
            weights=weights,
        )

    def _open_round(self) -> None:
        """Begin an attempt of the round, or continue the opening of a sum that was under way."""
        server = self.server
        if server.sum is not None and server.sum.round == self.round:  # killed between the opening and the checkpoint
            self._take_sum(server.sum)
            return
        if self.finished or server.stage is Stage.REVEALS:
            return
        self._start()

    def _start(self) -> None:
        x = self.state.run.x.numpy()
        public = public_vector(self._steps, self.state.run.server)
        self.server.start(self.round, x.tobytes() + (public.tobytes() if public is not None else b""))
        self._exchange += 1

    # ---- exchanges -------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> int:
        """The number of the current exchange since the server was started."""
        return self._exchange

    @property
    def stage(self) -> str:
        """The stage of the current exchange, the name of a `secure_sum.server.Stage` in lower case."""
        return self.server.stage.name.lower()

    @property
    def addressees(self) -> set[str]:
        """The parties to which the current exchange has something to send."""
        return {self.parties[number] for number in self.server.addressees} if not self.finished else set()

    @property
    def waiting(self) -> set[str]:
        """The parties without whose answers the current exchange is not complete."""
        return {self.parties[number] for number in self.server.waiting}

    @property
    def ready(self) -> bool:
        """Whether all parties that can still answer in this exchange have done so."""
        return not self.finished and self.server.ready

    @property
    def answered(self) -> int:
        """The number of parties that have answered in this exchange; `needed` of them close it."""
        return self.server.answered

    @property
    def needed(self) -> int:
        """The number of answers with which this exchange can close."""
        certified = self.server.stage in (Stage.SIGNATURES, Stage.REVEALS)
        return self.terms.threshold if certified else self.terms.minimum

    @property
    def attempt(self) -> int:
        """The number of the current attempt."""
        return self.server.attempt

    @property
    def refusals(self) -> dict[str, str]:
        """The parties that refused for reasons that another attempt does not cure."""
        return dict(self._refusals)

    def request(self, node: str) -> SumRequest:
        """The current exchange for a party."""
        content, payload = self.server.request_apart(self.parties.index(node))
        return SumRequest(self.run, node, self._exchange, "exchange", octets(content), self._shared(payload))

    def _shared(self, payload: bytes) -> Octets | None:
        """The payload as one array for all parties, by which a carrier notices that it is the same."""
        if not payload:
            return None
        if self._payload is None or self._payload[0] is not payload:
            self._payload = payload, octets(payload)
        return self._payload[1]

    def requests(self) -> dict[str, SumRequest]:
        """The current exchange for every party to which it has something to send."""
        return {node: self.request(node) for node in sorted(self.addressees)}

    @writes
    def receive(self, node: str, given: Mapping[str, Any] | SumReply | Refusal) -> Outcome:
        """Take an answer of `node`. What does not fit is noted in the journal and changes nothing."""
        try:
            message = given if isinstance(given, SumReply | Refusal) else from_fields(given, self.message_length)
            if not isinstance(message, SumReply | Refusal):
                raise WireError("it is no answer of a secure sum")
            if (message.run, message.node) != (self.run, node) or node not in self.parties:
                raise WireError("it names another run or party")
            if isinstance(message, Refusal):
                return self._refused(node, message.reason)
            answers = decode_answers(message.content.data)
        except (WireError, Refused) as error:
            return self.fault(node, str(error))
        self.server.take(self.parties.index(node), answers)
        while self.server.reports:
            report = self.server.reports.popleft()
            about = self.parties[report.party]
            self.journal.note("report", round=self.round, party=about, attempt=report.attempt, what=report.what)
        reasons = [answer.reason for answer in answers if isinstance(answer, SumRefusal)]
        if reasons:
            return self._refused(node, reasons[0])
        if any(isinstance(answer, MaskedVector) for answer in answers):
            self._refusals.pop(node, None)
        return "taken"

    def _refused(self, node: str, reason: str) -> Outcome:
        self.journal.note("refused", round=self.round, party=node, reason=reason)
        if reason in LASTING:
            self._refusals[node] = reason
        return "refused"

    @writes
    def repeat_round(self) -> None:
        """Give up the sum that is being opened, and attempt the round again."""
        self.journal.note("given up", round=self.round, stage=self.stage, left=self.answered)
        self._fail(self.server.missing)

    def _fail(self, missing: set[int]) -> None:
        """Begin another attempt, and remember because of whom."""
        self.at_fault = [self.parties[number] for number in sorted(missing | self.server.faulty)]
        self._start()

    def invite_everyone(self) -> None:
        """Invite again the parties that are left out because a sum could not be opened without their seeds.

        It is for callers that get too few answers from the others.
        """
        self.server.invite_everyone()

    @writes
    def fault(self, node: str, why: str) -> Outcome:
        """Note that `node` sent something that cannot be read as a message."""
        self.journal.note("dropped", round=self.round, party=node, why=why)
        return "dropped"

    @writes
    def close_exchange(self) -> None:
        """Close the current exchange with the parties that have answered.

        If too few are left, the round is attempted again. At the end of a round x moves by the sum that was opened.
        """
        server = self.server
        silent, missing = sorted(self.waiting), server.missing
        stage = self.stage
        if silent:
            self.journal.note("away", round=self.round, stage=stage, parties=silent)
        try:
            if server.stage is Stage.SIGNATURES and not self._pay():
                return
            server.advance()
        except AttemptFailed as failed:
            if server.stage is Stage.REVEALS and server.waiting:
                return  # the shares of a party that is away can still open the sum
            self.journal.note("attempt failed", round=self.round, stage=stage, left=failed.left, needed=failed.needed)
            self._fail(missing)
            return
        self._exchange += 1
        if server.sum is not None:
            self._take_sum(server.sum)

    def _pay(self) -> bool:
        """Pay for the sum that is about to be opened; if the budget does not allow it, stop the run."""
        if self.mechanism is None or self.server.answered < self.terms.threshold:  # then nothing will be opened
            return True
        try:
            self.mechanism.pay(self.round)
        except BudgetSpent as spent:
            self.stop(str(spent))
            return False
        return True

    # ---- the sum ---------------------------------------------------------------------------------------------------

    def _take_sum(self, opened: OpenedSum) -> None:
        """Take the server's step with the sum of this round. It counts once the checkpoint is written."""
        state, numbers = self.state.run, list(opened.survivors)
        total = self.grid.decode(opened.values).to(state.x)
        broken = self._limits.broken_by(total.numpy(), None)
        if broken is not None:
            self.stop(
                f"the sum of round {self.round} is not one of honest messages: {broken}; a party sent an invalid "
                "vector, and the sum does not show which one; look into the parties' logs, and begin another run"
            )
            return
        row = self._observed((), len(numbers)) if self.plan.adds_row(self.round) else None
        moved, server = self._moved(total, numbers)
        if row is not None:
            self._record(row)
        state.x, state.optimizer, state.server = moved.x, moved.optimizer, server
        self.summed = len(numbers)
        state.messages += len(numbers)
        for i in numbers:
            self.state.parties[self.parties[i]].accept("", self.round)
        state.round += 1
        self._save()
        self._open_round()

    def close(self) -> None:
        super().close()
        if self._server is not None:
            self._server.close()
            self._server = None


def _counting_honest(privacy: Privacy, honest: int) -> Privacy:
    """The statement for sums with the noise of so many honest parties. Raises `UsageError` for other statements."""
    if privacy.trust != "secure-sum":
        raise UsageError(f"a secure sum needs trust='secure-sum', got trust={privacy.trust!r}")
    if privacy.noise != "secure":
        raise UsageError(f"a secure sum between parties has noise='secure', got noise={privacy.noise!r}")
    if privacy.honest is not None and privacy.honest != honest:
        raise UsageError(
            f"honest follows from min_parties and colluding, and is {honest}; got honest = {privacy.honest}"
        )
    return dataclasses.replace(privacy, honest=honest)
